package blob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"syscall"

	"filippo.io/age"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// The age format adds a header, a nonce, and a tag for each chunk.
	sealedNonce = 16
	sealedChunk = 64 << 10
	sealedTag   = 16
)

// Encrypted is a [Backend] that encrypts content in the age format (age-encryption.org/v1) before
// it reaches another backend, so that the age command can decrypt it. The other backend still sees
// keys, times, and sizes to within a few bytes.
type Encrypted struct {
	backend   Backend
	identity  age.Identity
	recipient age.Recipient
	header    int64 // bytes of age's header and nonce, the same for all objects
}

// Encrypt returns a backend that encrypts with the one identity in keyFile, a file of age-keygen
// with or without -pq. Only the file's owner may have access to it.
func Encrypt(backend Backend, keyFile string) (*Encrypted, error) {
	e, err := encrypt(backend, keyFile)
	if err != nil {
		return nil, fmt.Errorf("open the key file for blobs %s: %w", keyFile, err)
	}
	return e, nil
}

func encrypt(backend Backend, keyFile string) (*Encrypted, error) {
	f, err := os.Open(keyFile)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if err := CheckKeyFile(info); err != nil {
		return nil, err
	}
	identities, err := age.ParseIdentities(f)
	if err != nil || len(identities) != 1 {
		return nil, errors.New("it must hold exactly one key of age-keygen (AGE-SECRET-KEY-…)")
	}
	e := &Encrypted{backend: backend, identity: identities[0]}
	switch i := e.identity.(type) {
	case *age.X25519Identity:
		e.recipient = i.Recipient()
	case *age.HybridIdentity:
		e.recipient = i.Recipient()
	default:
		return nil, fmt.Errorf("its key is a %T: make one with age-keygen", i)
	}
	sealed, err := age.EncryptReader(bytes.NewReader(nil), e.recipient)
	if err != nil {
		return nil, err
	}
	length, err := io.Copy(io.Discard, sealed)
	e.header = length - sealedTag
	return e, err
}

// CheckKeyFile returns an error with a remedy if others can read a key file. A file owned by root
// may be group-readable: Kubernetes and Debian provide files in this way.
func CheckKeyFile(info fs.FileInfo) error {
	forbidden := fs.FileMode(0o077)
	if owner, ok := info.Sys().(*syscall.Stat_t); ok && owner.Uid == 0 {
		forbidden = 0o037
	}
	if info.Mode().Perm()&forbidden != 0 {
		return fmt.Errorf("its mode %v lets others read it: chmod 600, or 640 for a file of root and the group of a service",
			info.Mode().Perm())
	}
	return nil
}

// Close closes the underlying backend.
func (e *Encrypted) Close() error {
	if c, ok := e.backend.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// sealedSize returns the encrypted size of n bytes.
func (e *Encrypted) sealedSize(n int64) int64 {
	return e.header + n + sealedTag*max(1, (n+sealedChunk-1)/sealedChunk)
}

// plainSize is the inverse of sealedSize. It is negative if the object was not encrypted.
func (e *Encrypted) plainSize(n int64) int64 {
	n -= e.header
	return n - sealedTag*((n+sealedChunk+sealedTag-1)/(sealedChunk+sealedTag))
}

// Put implements [Backend].
func (e *Encrypted) Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error {
	sealed, err := age.EncryptReader(content, e.recipient)
	if err != nil {
		return fmt.Errorf("encrypt blob %q: %w", key, err)
	}
	return e.backend.Put(ctx, key, e.sealedSize(size), sealed, replace)
}

// Get implements [Backend]. The content of a span is authentic, but the underlying backend may swap
// objects.
func (e *Encrypted) Get(ctx context.Context, key string, span Span) (io.ReadCloser, error) {
	in := &ciphertext{ctx: ctx, backend: e.backend, key: key, size: e.sealedSize(span.Size)}
	in.to = in.size
	var out io.Reader
	var err error
	if span.Whole() {
		out, err = age.Decrypt(io.NewSectionReader(in, 0, in.size), e.identity)
	} else {
		var at io.ReaderAt
		in.to = 0 // age reads the header and the last chunk first; then all chunks of the span are read at once
		at, _, err = age.DecryptReaderAt(in, in.size, e.identity)
		first, last := span.Offset/sealedChunk, (span.Offset+span.Length-1)/sealedChunk
		in.from, in.to = e.header+first*(sealedChunk+sealedTag), min(in.size, e.header+(last+1)*(sealedChunk+sealedTag))
		out = io.NewSectionReader(at, span.Offset, span.Length)
	}
	if err != nil {
		_ = in.Close()
		return nil, in.explain(err)
	}
	return &plaintext{from: out, in: in}, nil
}

// Stat implements [Backend].
func (e *Encrypted) Stat(ctx context.Context, key string) (Entry, error) {
	entry, err := e.backend.Stat(ctx, key)
	if err != nil {
		return Entry{}, err
	}
	entry.Size = e.plainSize(entry.Size)
	return entry, nil
}

// Delete implements [Backend].
func (e *Encrypted) Delete(ctx context.Context, key string) error { return e.backend.Delete(ctx, key) }

// List implements [Backend].
func (e *Encrypted) List(ctx context.Context, prefix, after string) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		for entry, err := range e.backend.List(ctx, prefix, after) {
			if err == nil {
				entry.Size = e.plainSize(entry.Size)
			}
			if !yield(entry, err) {
				return
			}
		}
	}
}

// ciphertext is an [io.ReaderAt] of an encrypted object for one goroutine. Sequential reads share a
// stream.
type ciphertext struct {
	ctx      context.Context // of the request being served
	backend  Backend
	key      string
	size     int64
	from, to int64 // the range to read as one stream
	body     io.ReadCloser
	at, end  int64 // the position and the end of body
	err      error // of the backend, which age may not return
}

func (c *ciphertext) ReadAt(p []byte, off int64) (int, error) {
	if c.body == nil || off != c.at || c.at == c.end {
		if err := c.seek(off, int64(len(p))); err != nil {
			return 0, c.record(err)
		}
	}
	n, err := io.ReadFull(c.body, p)
	c.at += int64(n)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = &Error{Op: "get", Key: c.key, Kind: ErrUnavailable, Retryable: true, Err: errors.New("the stream ended early")}
	}
	return n, c.record(err)
}

func (c *ciphertext) record(err error) error {
	if err != nil {
		c.err = err
	}
	return err
}

// seek opens the stream that contains n bytes at off.
func (c *ciphertext) seek(off, n int64) error {
	_ = c.Close()
	end := off + n
	if c.from <= off && off < c.to {
		end = c.to
	}
	body, err := c.backend.Get(c.ctx, c.key, Span{Size: c.size, Offset: off, Length: end - off})
	if err == nil {
		c.body, c.at, c.end = body, off, end
	}
	return err
}

func (c *ciphertext) Close() error {
	if c.body == nil {
		return nil
	}
	err := c.body.Close()
	c.body = nil
	return err
}

// explain converts an error of age: a failed backend, a wrong key, or content in another format.
func (c *ciphertext) explain(err error) error {
	var wrongKey *age.NoIdentityMatchError
	switch {
	case c.err != nil:
		return c.err
	case errors.As(err, &wrongKey):
		return &Error{
			Op: "get", Key: c.key, Kind: ErrUnavailable, Err: errors.New("it was not encrypted with the key in the key file"),
			Remedy: "use the key file that the store was written with",
		}
	}
	return &Error{Op: "get", Key: c.key, Kind: proto.ErrCorrupt, Err: err}
}

// plaintext is the decrypted content.
type plaintext struct {
	from io.Reader
	in   *ciphertext
}

func (p *plaintext) Read(b []byte) (int, error) {
	n, err := p.from.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		err = p.in.explain(err)
	}
	return n, err
}

func (p *plaintext) Close() error { return p.in.Close() }
