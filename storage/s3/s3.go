// Package s3 keeps blobs in a bucket of Amazon S3 or of a server that speaks its protocol. It makes each request once; what is tried again
// and how blobs are checked is package blob's.
package s3

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go/logging"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/blob"
)

const (
	// partSize is how large the parts are that larger objects are sent in, in bytes, unless there would be more than maxParts. Each is in
	// memory until the server has it, lanes of them at once for each object.
	partSize = 8 << 20
	maxParts = 10_000
	lanes    = 3
	// abortWait is how long the server has to forget an upload that ended too early.
	abortWait = 10 * time.Second
	// dialWait is how long making a connection may take.
	dialWait = 10 * time.Second
	// DefaultSilence is [Config].Silence where that is 0.
	DefaultSilence = 15 * time.Second
)

// Config says where a bucket is and how it is spoken to. Credentials are found as all programs on the AWS SDK find them: in the environment,
// in files, from a web identity, from the machine.
type Config struct {
	Bucket    string
	Prefix    string // of all keys, without a slash at either end; may be empty
	Endpoint  string // URL of the server; empty for what the environment says, else Amazon's in the region
	Region    string // empty for what the environment or the AWS configuration file says
	PathStyle bool   // the bucket is in the path of URLs and not in the name of the host
	// SSE and KMSKey are passed on with what is stored: AES256, aws:kms or aws:kms:dsse, and the id of a key for the latter two.
	SSE    string
	KMSKey string
	// Silence is how long a server may send and take nothing before its connection is given up.
	Silence time.Duration
	// Policy is that of the requests that one larger object is made of.
	Policy blob.Policy
}

// Store is a [blob.Backend].
type Store struct {
	client    *s3.Client
	transport *http.Transport
	cfg       Config // with the region that was found
	// overwrites is true once the server has said that it knows no conditional requests.
	overwrites atomic.Bool
}

// Open makes a store. It makes no request to the server.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	silence := cmp.Or(cfg.Silence, DefaultSilence)
	dialer := &net.Dialer{Timeout: dialWait}
	dialing := awshttp.NewBuildableClient().WithTransportOptions(func(t *http.Transport) {
		t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dialer.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &conn{Conn: c, silence: silence}, nil
		}
	})
	options := []func(*config.LoadOptions) error{config.WithHTTPClient(dialing), config.WithLogger(logging.Nop{})}
	if cfg.Region != "" {
		options = append(options, config.WithRegion(cfg.Region))
	}
	found, err := config.LoadDefaultConfig(ctx, options...)
	if err != nil {
		return nil, fmt.Errorf("open the S3 store: read the AWS configuration: %w", err)
	}
	if found.Region == "" {
		return nil, errors.New("open the S3 store: no region is known: add region=… to its URL or set AWS_REGION; most servers that are not Amazon's take us-east-1")
	}
	cfg.Region = found.Region
	found.Credentials = credentials{found.Credentials}
	// The SDK's own client, with authorities that the environment names, gives its transport to nobody who would close its connections. A
	// store answers in its place: it sends nobody elsewhere.
	transport := found.HTTPClient.(*awshttp.BuildableClient).GetTransport()
	found.HTTPClient = &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	client := s3.NewFromConfig(found, func(o *s3.Options) {
		o.UsePathStyle = cfg.PathStyle
		if cfg.Endpoint != "" {
			o.BaseEndpoint = aws.String(cfg.Endpoint)
		}
		o.Retryer = aws.NopRetryer{}
		// Checksums of later years would be sent as trailers, which many servers do not know. Digests are checked without them.
		o.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
		o.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenRequired
	})
	return &Store{client: client, transport: transport, cfg: cfg}, nil
}

// Close closes the connections that are not in use.
func (s *Store) Close() error {
	s.transport.CloseIdleConnections()
	return nil
}

// conn is a connection that ends when for longer than silence somebody waits for it, and nothing is read and nothing written.
type conn struct {
	net.Conn
	silence time.Duration
}

func (c *conn) Read(p []byte) (int, error) {
	if err := c.SetDeadline(time.Now().Add(c.silence)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

func (c *conn) Write(p []byte) (int, error) {
	if err := c.SetDeadline(time.Now().Add(c.silence)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// name gives the name of an object in the bucket.
func (s *Store) name(key string) *string {
	if s.cfg.Prefix == "" {
		return aws.String(key)
	}
	return aws.String(s.cfg.Prefix + "/" + key)
}

func (s *Store) bucket() *string { return aws.String(s.cfg.Bucket) }

func optional(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// Put is [blob.Backend]'s. Objects of up to 8 MiB are one request, larger ones an upload in parts.
func (s *Store) Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error {
	ifNoneMatch := aws.String("*")
	if replace || s.overwrites.Load() {
		ifNoneMatch = nil
	}
	if size > partSize {
		return s.upload(ctx, key, size, content, ifNoneMatch)
	}
	body := make([]byte, size)
	if err := fill(content, body, true); err != nil {
		return err
	}
	put := func(ifNoneMatch *string) error {
		_, err := s.client.PutObject(ctx, &s3.PutObjectInput{
			Bucket: s.bucket(), Key: s.name(key), Body: bytes.NewReader(body), ContentLength: aws.Int64(size), IfNoneMatch: ifNoneMatch,
			ServerSideEncryption: types.ServerSideEncryption(s.cfg.SSE), SSEKMSKeyId: optional(s.cfg.KMSKey),
		})
		return err
	}
	err := put(ifNoneMatch)
	if ifNoneMatch != nil && status(err) == http.StatusNotImplemented {
		s.overwrites.Store(true)
		err = put(nil)
	}
	return s.explain(ctx, "put", key, err)
}

// fill reads a part, and what must come after the last one: the end.
func fill(content io.Reader, part []byte, last bool) error {
	_, err := io.ReadFull(content, part)
	if err == nil && last {
		_, err = io.ReadFull(content, make([]byte, 1))
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err == nil:
			err = errors.New("it goes on after its size")
		}
	}
	if err != nil {
		return fmt.Errorf("read what is to be stored: %w", err)
	}
	return nil
}

// Get is [blob.Backend]'s.
func (s *Store) Get(ctx context.Context, key string, span blob.Span) (io.ReadCloser, error) {
	in := &s3.GetObjectInput{Bucket: s.bucket(), Key: s.name(key)}
	if !span.Whole() {
		in.Range = aws.String(fmt.Sprintf("bytes=%d-%d", span.Offset, span.Offset+span.Length-1))
	}
	out, err := s.client.GetObject(ctx, in)
	if err != nil {
		return nil, s.explain(ctx, "get", key, err)
	}
	err = s.compare(out, key, span)
	if err != nil {
		_ = out.Body.Close()
		return nil, err
	}
	return &body{ReadCloser: out.Body, ctx: ctx, store: s, key: key}, nil
}

// compare sees whether an answer is what was asked for.
func (s *Store) compare(out *s3.GetObjectOutput, key string, span blob.Span) error {
	if span.Whole() {
		if n := out.ContentLength; n != nil && *n != span.Size {
			return &blob.Error{Op: "get", Key: key, Kind: proto.ErrCorrupt, Err: fmt.Errorf("it has %d bytes and not %d", *n, span.Size)}
		}
		return nil
	}
	place := fmt.Sprintf("bytes %d-%d/", span.Offset, span.Offset+span.Length-1)
	total, ok := strings.CutPrefix(aws.ToString(out.ContentRange), place)
	switch {
	case !ok:
		return &blob.Error{
			Op: "get", Key: key, Kind: proto.ErrCorrupt,
			Err: fmt.Errorf("asked for %s%d, the server answered with %.100q", place, span.Size, aws.ToString(out.ContentRange)),
		}
	case total != fmt.Sprint(span.Size) && total != "*":
		return &blob.Error{Op: "get", Key: key, Kind: proto.ErrCorrupt, Err: fmt.Errorf("it has %.20s bytes and not %d", total, span.Size)}
	}
	return nil
}

// body gives errors of a stream a kind.
type body struct {
	io.ReadCloser
	ctx   context.Context // of the request that it reads for
	store *Store
	key   string
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = b.store.explain(b.ctx, "get", b.key, err)
	}
	return n, err
}

// Stat is [blob.Backend]'s.
func (s *Store) Stat(ctx context.Context, key string) (blob.Entry, error) {
	out, err := s.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: s.bucket(), Key: s.name(key)})
	if err != nil {
		return blob.Entry{}, s.explain(ctx, "stat", key, err)
	}
	return blob.Entry{Key: key, Size: aws.ToInt64(out.ContentLength), Modified: aws.ToTime(out.LastModified)}, nil
}

// Delete is [blob.Backend]'s.
func (s *Store) Delete(ctx context.Context, key string) error {
	_, err := s.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: s.bucket(), Key: s.name(key)})
	err = s.explain(ctx, "delete", key, err)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}

// List is [blob.Backend]'s. Names that are not keys are no blobs.
func (s *Store) List(ctx context.Context, prefix, after string) iter.Seq2[blob.Entry, error] {
	return func(yield func(blob.Entry, error) bool) {
		in := &s3.ListObjectsV2Input{Bucket: s.bucket(), Prefix: s.name(prefix)}
		if after != "" {
			in.StartAfter = s.name(after)
		}
		pages := s3.NewListObjectsV2Paginator(s.client, in)
		for pages.HasMorePages() {
			page, err := pages.NextPage(ctx)
			if err != nil {
				yield(blob.Entry{}, s.explain(ctx, "list", prefix, err))
				return
			}
			for _, o := range page.Contents {
				key := strings.TrimPrefix(aws.ToString(o.Key), aws.ToString(s.name("")))
				if !blob.ValidKey(key) || key <= after {
					continue
				}
				if !yield(blob.Entry{Key: key, Size: aws.ToInt64(o.Size), Modified: aws.ToTime(o.LastModified)}, nil) {
					return
				}
			}
		}
	}
}
