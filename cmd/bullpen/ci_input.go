package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	cleanupTimeout = 10 * time.Second
	unpackTimeout  = 60 // seconds; within the maximum of every plan
)

// ciInput is what a run begins with.
type ciInput struct {
	dir string
	ref string // a commit of the repository in dir; empty for the files
}

// git runs git in the directory.
func (in *ciInput) git(ctx context.Context, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "git", append([]string{"-C", in.dir}, args...)...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("git %s: %w: %s", args[0], err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// revision returns the commit and branch of the input, empty without a repository.
func (in *ciInput) revision(ctx context.Context) (commit, branch string) {
	ref := in.ref
	if ref == "" {
		ref = "HEAD"
	}
	commit, err := in.git(ctx, "rev-parse", "--verify", "--end-of-options", ref+"^{commit}")
	if err != nil {
		return "", ""
	}
	branch, err = in.git(ctx, "rev-parse", "--abbrev-ref", "--end-of-options", ref)
	if branch = gitLine(branch); err != nil || branch == "HEAD" {
		branch = ""
	}
	return gitLine(commit), branch
}

// gitLine returns git's output without the line break. Some versions print --end-of-options before
// it, even without other output.
func gitLine(text string) string {
	return strings.TrimSpace(strings.TrimPrefix(text, "--end-of-options\n"))
}

// upload stores the input in a new thread and returns the thread's id.
func (in *ciInput) upload(ctx context.Context, cl *client.Client, s streams) (thread string, err error) {
	archive, err := os.CreateTemp("", "bullpen-ci-*.tar")
	if err != nil {
		return "", fmt.Errorf("pack %s: %w", in.dir, err)
	}
	defer os.Remove(archive.Name()) //nolint:errcheck // a temporary file
	if err := errors.Join(in.pack(ctx, archive), archive.Close()); err != nil {
		return "", fmt.Errorf("pack %s: %w", in.dir, err)
	}
	thread = "ci-input-" + strings.ToLower(rand.Text())
	name := ".bullpen-import-" + rand.Text() + ".tar"
	s.progressf("uploading %s", in.dir)
	if _, err := uploadFile(ctx, cl, client.ThreadFiles(thread), archive.Name(), name, nil); err != nil {
		return "", err
	}
	result, err := cl.Execute(ctx, api.ExecuteRequest{
		Code: unpackProgram(name), Language: proto.Bash, Timeout: unpackTimeout, ThreadID: thread,
	})
	switch {
	case err != nil:
		return "", fmt.Errorf("unpack the input in thread %s: %w", thread, err)
	case result.ErrorCode != nil:
		return "", fmt.Errorf("unpack the input in thread %s: %w", thread,
			platformError(result.TraceID, *result.ErrorCode, result.ErrorMessage))
	case !result.Success:
		return "", fmt.Errorf("unpack the input in thread %s: %s: %s", thread, result.TraceID,
			strings.Map(printableLine, result.Stdout+result.Stderr))
	}
	return thread, nil
}

// pack writes the input as a tar.
func (in *ciInput) pack(ctx context.Context, w io.Writer) error {
	if in.ref != "" {
		var stderr bytes.Buffer
		cmd := exec.CommandContext(ctx, "git", "-C", in.dir, "archive", "--format=tar", "--end-of-options", in.ref)
		cmd.Stdout, cmd.Stderr = w, &stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("git archive: %w: %s", err, strings.TrimSpace(stderr.String()))
		}
		return nil
	}
	names, err := in.files(ctx)
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(in.dir)
	if err != nil {
		return err
	}
	defer root.Close() //nolint:errcheck // only read
	out := tar.NewWriter(w)
	for _, name := range names {
		if err := packFile(out, root, name); err != nil {
			return err
		}
	}
	return out.Close()
}

// files returns the paths of all files to upload: in a Git repository those that are not ignored.
func (in *ciInput) files(ctx context.Context) (names []string, err error) {
	if list, err := in.git(ctx, "ls-files", "-z", "--cached", "--others", "--exclude-standard"); err == nil {
		names = strings.FieldsFunc(list, func(r rune) bool { return r == 0 })
		slices.Sort(names)
		return slices.Compact(names), nil
	}
	err = filepath.WalkDir(in.dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err = filepath.Rel(in.dir, name)
		names = append(names, name)
		return err
	})
	return names, err
}

// packFile adds a file or link. It skips other kinds, and files missing from a repository's
// directory.
func packFile(out *tar.Writer, root *os.Root, name string) error {
	info, err := root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	link := ""
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		if link, err = root.Readlink(name); err != nil {
			return err
		}
	case !info.Mode().IsRegular():
		return nil
	}
	header, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	header.Name, header.Uid, header.Gid, header.Uname, header.Gname = filepath.ToSlash(name), 0, 0, "", ""
	if err := out.WriteHeader(header); err != nil || link != "" {
		return err
	}
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read
	_, err = io.CopyN(out, f, info.Size())
	return err
}
