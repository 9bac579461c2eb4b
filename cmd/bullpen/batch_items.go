package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
)

// batchItems are the lines of a new batch, behind one line of settings.
type batchItems struct {
	settings []byte // with its line break; empty for none
	file     *os.File
	size     int64
	name     string   // of the file, for messages
	names    []string // of the programs, by line; nil if the lines are the user's own
	remove   bool     // the file is temporary
}

// reader returns a reader of the body.
func (b *batchItems) reader() io.Reader {
	return io.MultiReader(bytes.NewReader(b.settings), io.NewSectionReader(b.file, 0, b.size-int64(len(b.settings))))
}

func (b *batchItems) close() {
	_ = b.file.Close() // only read from
	if b.remove {
		_ = os.Remove(b.file.Name()) // in the directory for temporary files
	}
}

// open opens the items named by the arguments, and checks as much as possible without the server.
func (c *batchRunCommand) open(s streams) (items *batchItems, err error) {
	settings, err := c.settings()
	if err != nil {
		return nil, err
	}
	items = &batchItems{settings: settings, name: c.Source}
	if c.Source == "-" {
		items.name = "standard input"
		err = items.spool(s.in)
	} else {
		err = items.openPath(s, c.Source)
	}
	if err != nil {
		return nil, fmt.Errorf("read the items: %w", err)
	}
	size, err := items.file.Seek(0, io.SeekEnd)
	if items.size = size + int64(len(settings)); err == nil && items.size > proto.MaxBatchBytes {
		err = fmt.Errorf("read the items: %s is larger than %d MiB: make several batches", items.name,
			proto.MaxBatchBytes>>20)
	}
	if err != nil {
		items.close()
		return nil, err
	}
	return items, nil
}

func (b *batchItems) openPath(s streams, path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case info.IsDir():
		return b.readDir(s, path)
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() { // such as a pipe: it can be read once
		return errors.Join(b.spool(f), f.Close())
	}
	b.file = f
	return nil
}

// spool copies unseekable input into a temporary file, so that it can be resent.
func (b *batchItems) spool(r io.Reader) error {
	f, err := os.CreateTemp("", "bullpen-batch-")
	if err != nil {
		return err
	}
	b.file, b.remove = f, true
	if _, err := io.Copy(f, io.LimitReader(r, proto.MaxBatchBytes+1)); err != nil {
		b.close()
		return err
	}
	return nil
}

// readDir makes an item of each program in a directory.
func (b *batchItems) readDir(s streams, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var lines bytes.Buffer
	skipped := 0
	for _, entry := range entries {
		name := entry.Name()
		flags := programFlags{File: name}
		language, err := flags.language(nil)
		if strings.HasPrefix(name, ".") || !isFile(filepath.Join(dir, name)) {
			continue
		}
		if err != nil {
			skipped++
			continue
		}
		code, err := readText(filepath.Join(dir, name), nil, proto.MaxCodeBytes)
		if err != nil {
			return err
		}
		if err := printJSON(&lines,
			map[string]any{"code": code, "language": language, "metadata": map[string]string{"file": name}}); err != nil {
			return err
		}
		b.names = append(b.names, filepath.Join(dir, name))
	}
	if len(b.names) == 0 {
		return fmt.Errorf("no file in %s has the extension of a language", dir)
	}
	if skipped > 0 {
		s.errorf("left out because their names have no extension of a language: %d of the files in %s", skipped, dir)
	}
	return b.spool(&lines)
}

// isFile reports whether a path leads to a regular file.
func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// settings returns the line with the settings from the flags, empty if there are none.
func (c *batchRunCommand) settings() ([]byte, error) {
	batch, request := map[string]any{}, map[string]any{}
	program := programFlags{Language: c.Language}
	if err := program.check(); err != nil {
		return nil, err
	}
	if c.Program != "" {
		if c.Program == "-" {
			return nil, usagef("--program -: the program must be a file")
		}
		code, err := readText(c.Program, nil, proto.MaxCodeBytes)
		if err != nil {
			return nil, fmt.Errorf("read --program: %w", err)
		}
		program.File = c.Program
		language, err := program.language([]byte(code))
		if err != nil {
			return nil, err
		}
		request["code"], c.Language = code, string(language)
	}
	env, err := nameValues("-e", c.Env)
	if err != nil {
		return nil, err
	}
	metadata, err := nameValues("-m", c.Metadata)
	if err != nil {
		return nil, err
	}
	set := func(to map[string]any, name string, value any, given bool) {
		if given {
			to[name] = value
		}
	}
	set(request, "language", c.Language, c.Language != "")
	set(request, "profile", c.Profile, c.Profile != "")
	set(request, "timeout", c.Timeout, c.Timeout != 0)
	set(request, "env_vars", env, len(env) > 0)
	set(batch, "metadata", metadata, len(metadata) > 0)
	set(batch, "max_parallel", c.MaxParallel, c.MaxParallel != 0)
	set(batch, "stop_on_failure", true, c.StopOnFailure)
	set(batch, "priority", c.Priority, c.Priority != 0)
	set(batch, "webhook_url", c.WebhookURL, c.WebhookURL != "")
	set(batch, "request", request, len(request) > 0)
	if len(batch) == 0 {
		return nil, nil
	}
	line, err := json.Marshal(map[string]any{"batch": batch})
	return append(line, '\n'), err
}

// explain locates an item refused by the server in the user's terms: the file of a program, or its
// line without counting the settings line.
func (b *batchItems) explain(err error) error {
	refused, ok := errors.AsType[*client.Error](err)
	if !ok {
		return err
	}
	rest, ok := strings.CutPrefix(refused.Message, "line ")
	if !ok {
		return err
	}
	number, why, _ := strings.Cut(rest, ": ")
	line, errNumber := strconv.Atoi(number)
	if errNumber != nil {
		return err
	}
	if len(b.settings) > 0 {
		line--
	}
	placed := *refused
	switch {
	case line == 0:
		placed.Message = "the flags of the command: " + why
	case line <= len(b.names):
		placed.Message = b.names[line-1] + ": " + why
	default:
		placed.Message = fmt.Sprintf("%s, line %d: %s", b.name, line, why)
	}
	return &placed
}
