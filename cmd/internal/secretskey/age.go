// Package secretskey implements the operator's keys, which wrap the data key of secrets: age
// identities in a file, or a command that calls a key management service.
package secretskey

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"filippo.io/age"

	"github.com/bullpen-run/bullpen/storage/blob"
)

// maxWrapped bounds a wrapped data key in bytes.
const maxWrapped = 64 << 10

// File is a file with age identities, one per line, as written by age-keygen. Each identity unwraps
// data wrapped with any file that contained it. The file is read at each use, so that it can be
// replaced while bullpen runs.
type File struct{ Path string }

// Wrap encrypts a data key for all identities.
func (f File) Wrap(_ context.Context, dataKey []byte) ([]byte, string, error) {
	_, recipients, err := f.read()
	if err != nil {
		return nil, "", err
	}
	var wrapped bytes.Buffer
	names := make([]string, len(recipients))
	for i, r := range recipients {
		names[i] = fmt.Sprint(r)
	}
	w, err := age.Encrypt(&wrapped, recipients...)
	if err == nil {
		_, err = w.Write(dataKey)
	}
	if err == nil {
		err = w.Close()
	}
	return wrapped.Bytes(), strings.Join(names, ", "), err
}

// Unwrap decrypts a data key with one of the identities.
func (f File) Unwrap(_ context.Context, wrapped []byte) ([]byte, error) {
	identities, _, err := f.read()
	if err != nil {
		return nil, err
	}
	r, err := age.Decrypt(bytes.NewReader(wrapped), identities...)
	if _, none := errors.AsType[*age.NoIdentityMatchError](err); none {
		return nil, fmt.Errorf("the file %s has none of these keys: put the file of that time in its place, or name it "+
			"with --secrets-key", f.Path)
	}
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(r, maxWrapped))
}

func (f File) read() (identities []age.Identity, recipients []age.Recipient, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("read the key file for secrets %s: %w", f.Path, err)
		}
	}()
	file, err := os.Open(f.Path)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = file.Close() }() // only read
	info, err := file.Stat()
	if err != nil {
		return nil, nil, err
	}
	if err := blob.CheckKeyFile(info); err != nil {
		return nil, nil, err
	}
	if identities, err = age.ParseIdentities(io.LimitReader(file, maxWrapped)); err != nil {
		// the cause may quote one
		return nil, nil, errors.New("it must hold keys of age-keygen (AGE-SECRET-KEY-…), one a line")
	}
	for _, identity := range identities {
		switch i := identity.(type) {
		case *age.X25519Identity:
			recipients = append(recipients, i.Recipient())
		case *age.HybridIdentity:
			recipients = append(recipients, i.Recipient())
		default:
			return nil, nil, fmt.Errorf("it has a %T: make keys with age-keygen", i)
		}
	}
	return identities, recipients, nil
}

// Create creates the file with a new identity, unless it exists. As soon as it has its name, it is
// durable, complete and readable by this user only.
func (f File) Create() (err error) {
	if _, err := os.Lstat(f.Path); err == nil {
		return nil
	}
	identity, err := age.GenerateX25519Identity()
	if err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(f.Path))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }() // only read
	temporary, err := os.CreateTemp(dir.Name(), ".secrets-*")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(temporary, "# encrypts the secrets of bullpen; public key: %s\n%s\n",
		identity.Recipient(), identity)
	err = errors.Join(err, temporary.Sync(), temporary.Close())
	if err == nil {
		err = os.Link(temporary.Name(), f.Path)
	}
	if errors.Is(err, os.ErrExist) {
		err = nil // another process was faster
	}
	return errors.Join(err, os.Remove(temporary.Name()), dir.Sync())
}
