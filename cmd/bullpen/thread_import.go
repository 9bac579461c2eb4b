package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type threadImportCommand struct {
	remote    `embed:""`
	threadArg `embed:""`
	File      string `arg:"" help:"The uncompressed tar archive, such as bullpen thread export writes."`
	Timeout   int    `short:"t" default:"60" placeholder:"SECONDS" help:"Timeout of unpacking."`
}

func (*threadImportCommand) Help() string {
	return `Uploads the archive and unpacks it in an execution of the API key. The home directory needs space for the
archive and its content. Other files stay. The thread is created if it does not exist.`
}

func (c *threadImportCommand) Run(ctx context.Context, s streams) error {
	if c.Timeout < 1 {
		return usagef("-t %d: give a whole number of seconds, at least 1", c.Timeout)
	}
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	if err := c.checkFree(ctx, cl); err != nil {
		return err
	}
	// The name cannot be guessed, and is hidden in a listing of the home directory.
	name := ".bullpen-import-" + rand.Text() + ".tar"
	if _, err := uploadFile(ctx, cl, client.ThreadFiles(c.Thread), c.File, name, nil); err != nil {
		return err
	}
	s.progressf("unpacking %s", c.File)
	result, err := cl.Execute(ctx, api.ExecuteRequest{
		Code: unpackProgram(name), Language: proto.Bash, Timeout: c.Timeout, ThreadID: c.Thread,
	})
	if err != nil {
		return fmt.Errorf("unpack %s: %w\nThe archive may stay in the thread as %s until a program removes it",
			c.File, err, name)
	}
	return c.printResult(s, result.TraceID, &result.Result)
}

// checkFree returns an error if the thread is in use: an uploaded archive would stay there until
// the next execution.
func (c *threadImportCommand) checkFree(ctx context.Context, cl *client.Client) error {
	t, err := cl.Thread(ctx, c.Thread)
	if refused, ok := errors.AsType[*client.Error](err); ok && refused.Status == http.StatusNotFound &&
		refused.Code != "" {
		return nil
	}
	if err == nil && t.Holder != nil {
		err = fmt.Errorf("thread %s is in use by execution %s; wait for its end: bullpen wait %[2]s", c.Thread, *t.Holder)
	}
	return err
}

// unpackProgram returns a program that unpacks the archive of that name in the home directory and
// then removes it.
func unpackProgram(name string) string {
	return `cd -- "$HOME" || exit
xattrs=--xattrs
tar $xattrs --help >/dev/null 2>&1 || xattrs= # not every tar supports them
tar $xattrs -xpf ./` + name + `
code=$?
rm -f -- ./` + name + `
exit "$code"
`
}

func (c *threadImportCommand) printResult(s streams, id proto.TraceID, r *proto.Result) error {
	if c.JSON {
		if err := (&eventPrinter{streams: s, json: true}).result(id, r); err != nil {
			return err
		}
	} else {
		// The author of the archive chose the names in the messages of tar.
		_, _ = fmt.Fprint(s.err, strings.Map(printableLine, r.Stdout+r.Stderr))
	}
	switch {
	case r.Success && c.JSON:
		return nil
	case r.Success:
		_, err := fmt.Fprintf(s.out, "imported %s to %s\n", c.File, c.Thread)
		return err
	case c.JSON:
		return exitError{code: exitFailure}
	case r.ErrorCode != nil:
		return platformError(id, *r.ErrorCode, r.ErrorMessage)
	default:
		return fmt.Errorf("%s: tar exited with code %d; the files that it unpacked before stay", id, r.ExitCode)
	}
}
