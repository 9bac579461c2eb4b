package blob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"

	"filippo.io/age"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// What age makes of n bytes: a header, a nonce, and chunks, each with a tag.
	sealedNonce = 16
	sealedChunk = 64 << 10
	sealedTag   = 16
)

// Encrypted is a [Backend] that encrypts all content before it reaches another one, in age's format (age-encryption.org/v1), so that the
// age command can read what is stored. Keys, times, and sizes to a few bytes can be seen by whoever sees the other backend.
type Encrypted struct {
	under     Backend
	identity  age.Identity
	recipient age.Recipient
	header    int64 // bytes of age's header with the nonce; the same for all objects
}

// Encrypt makes a backend that encrypts with the key in keyFile: one identity, as age-keygen writes it, with or without -pq. Nobody but the
// owner may have access to the file.
func Encrypt(under Backend, keyFile string) (*Encrypted, error) {
	e, err := encrypt(under, keyFile)
	if err != nil {
		return nil, fmt.Errorf("open the key file for blobs %s: %w", keyFile, err)
	}
	return e, nil
}

func encrypt(under Backend, keyFile string) (*Encrypted, error) {
	f, err := os.Open(keyFile)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("its mode is %v, so that others have access: chmod 600", info.Mode().Perm())
	}
	identities, err := age.ParseIdentities(f)
	if err != nil || len(identities) != 1 {
		return nil, errors.New("it must hold one key, as age-keygen writes it (AGE-SECRET-KEY-…), and nothing else but comments")
	}
	e := &Encrypted{under: under, identity: identities[0]}
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

// Close closes the backend under it.
func (e *Encrypted) Close() error {
	if c, ok := e.under.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// sealed gives the size of what n bytes become.
func (e *Encrypted) sealed(n int64) int64 {
	return e.header + n + sealedTag*max(1, (n+sealedChunk-1)/sealedChunk)
}

// plain gives the size of what n bytes were, or less than 0 if they are not encrypted.
func (e *Encrypted) plain(n int64) int64 {
	n -= e.header
	return n - sealedTag*((n+sealedChunk+sealedTag-1)/(sealedChunk+sealedTag))
}

// Put is [Backend]'s.
func (e *Encrypted) Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error {
	sealed, err := age.EncryptReader(content, e.recipient)
	if err != nil {
		return fmt.Errorf("encrypt blob %q: %w", key, err)
	}
	return e.under.Put(ctx, key, e.sealed(size), sealed, replace)
}

// Get is [Backend]'s. What a span holds is what was put under some key, in its place; an end of the object is its end.
func (e *Encrypted) Get(ctx context.Context, key string, span Span) (io.ReadCloser, error) {
	in := &ciphertext{ctx: ctx, under: e.under, key: key, size: e.sealed(span.Size)}
	in.to = in.size
	var out io.Reader
	var err error
	if span.Whole() {
		out, err = age.Decrypt(io.NewSectionReader(in, 0, in.size), e.identity)
	} else {
		var at io.ReaderAt
		in.to = 0 // the head and the last chunk are read first, and then all chunks of the span in one go
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

// Stat is [Backend]'s.
func (e *Encrypted) Stat(ctx context.Context, key string) (Entry, error) {
	entry, err := e.under.Stat(ctx, key)
	if err != nil {
		return Entry{}, err
	}
	entry.Size = e.plain(entry.Size)
	return entry, nil
}

// Delete is [Backend]'s.
func (e *Encrypted) Delete(ctx context.Context, key string) error { return e.under.Delete(ctx, key) }

// List is [Backend]'s.
func (e *Encrypted) List(ctx context.Context, prefix, after string) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		for entry, err := range e.under.List(ctx, prefix, after) {
			if err == nil {
				entry.Size = e.plain(entry.Size)
			}
			if !yield(entry, err) {
				return
			}
		}
	}
}

// ciphertext reads an encrypted object at any place, one after the other. Reads that follow each other share a stream.
type ciphertext struct {
	ctx      context.Context // of the request that it reads for
	under    Backend
	key      string
	size     int64
	from, to int64 // what will be read in one go
	body     io.ReadCloser
	at, end  int64 // where body is, and where it ends
	err      error // of the backend, which age may not pass on
}

func (c *ciphertext) ReadAt(p []byte, off int64) (int, error) {
	if c.body == nil || off != c.at || c.at == c.end {
		if err := c.seek(off, int64(len(p))); err != nil {
			return 0, c.keep(err)
		}
	}
	n, err := io.ReadFull(c.body, p)
	c.at += int64(n)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = &Error{Op: "get", Key: c.key, Kind: ErrUnavailable, Again: true, Err: errors.New("the stream ended early")}
	}
	return n, c.keep(err)
}

func (c *ciphertext) keep(err error) error {
	if err != nil {
		c.err = err
	}
	return err
}

// seek opens the stream that n bytes at off belong to.
func (c *ciphertext) seek(off, n int64) error {
	_ = c.Close()
	end := off + n
	if c.from <= off && off < c.to {
		end = c.to
	}
	body, err := c.under.Get(c.ctx, c.key, Span{Size: c.size, Offset: off, Length: end - off})
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

// explain says what an error of age is: one of the backend, a wrong key, or something that was not encrypted like this.
func (c *ciphertext) explain(err error) error {
	var wrongKey *age.NoIdentityMatchError
	switch {
	case c.err != nil:
		return c.err
	case errors.As(err, &wrongKey):
		return &Error{
			Op: "get", Key: c.key, Kind: ErrUnavailable, Err: errors.New("it was not encrypted with the key in the key file"),
			Do: "give the key file that the store was written with",
		}
	}
	return &Error{Op: "get", Key: c.key, Kind: proto.ErrCorrupt, Err: err}
}

// plaintext reads what was decrypted.
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
