// Package s3 stores blobs in a bucket of Amazon S3 or an S3-compatible server. It makes each
// request once, except for parts of uploads; package blob retries and verifies.
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
	// partSize is the size of an upload's parts in bytes, unless there would be more than maxParts.
	// Each upload has uploadConcurrency parts in memory.
	partSize          = 8 << 20
	maxParts          = 10_000
	uploadConcurrency = 3
	// abortTimeout bounds the removal of a failed upload.
	abortTimeout = 10 * time.Second
	// dialTimeout bounds the opening of a connection.
	dialTimeout = 10 * time.Second
	// DefaultIdleTimeout is used if [Config].IdleTimeout is 0.
	DefaultIdleTimeout = 15 * time.Second
)

// Config configures a bucket. Credentials are found as in every program with the AWS SDK: in the
// environment, in files, from a web identity, from the machine.
type Config struct {
	Bucket    string
	Prefix    string // of all keys, without slashes at its ends; may be empty
	Endpoint  string // URL of the server; empty for the environment's, else Amazon's
	Region    string // empty for the region of the environment or the AWS configuration file
	PathStyle bool   // the bucket is in the path of URLs instead of the host name
	// SSE is AES256, aws:kms or aws:kms:dsse, and KMSKey a key id for the latter two. Both may be
	// empty.
	SSE    string
	KMSKey string
	// IdleTimeout is how long a connection may make no progress before it is closed.
	IdleTimeout time.Duration
	// Retry applies to each request of an upload in parts.
	Retry blob.RetryPolicy
}

// Store implements [blob.Backend].
type Store struct {
	client    *s3.Client
	transport *http.Transport
	cfg       Config // with the resolved region
	// unconditional is set once the server has rejected a conditional write as not implemented.
	unconditional atomic.Bool
}

// Open returns a store. It sends no request to the server.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	idleTimeout := cmp.Or(cfg.IdleTimeout, DefaultIdleTimeout)
	dialer := &net.Dialer{Timeout: dialTimeout}
	dialing := awshttp.NewBuildableClient().WithTransportOptions(func(t *http.Transport) {
		t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dialer.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &conn{Conn: c, idleTimeout: idleTimeout}, nil
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
		return nil, errors.New("open the S3 store: no region is configured: add region=… to its URL or set AWS_REGION; " +
			"most servers other than Amazon's accept us-east-1")
	}
	cfg.Region = found.Region
	found.Credentials = credentials{found.Credentials}
	// The SDK's client, which knows the certificate authorities of the environment, cannot close
	// its idle connections. This one can, and follows no redirects.
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
		// Newer checksums would be sent as trailers, which many servers do not support. Package
		// blob verifies digests.
		o.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
		o.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenRequired
	})
	return &Store{client: client, transport: transport, cfg: cfg}, nil
}

// Close closes idle connections.
func (s *Store) Close() error {
	s.transport.CloseIdleConnections()
	return nil
}

// conn fails when a Read or Write makes no progress for idleTimeout.
type conn struct {
	net.Conn
	idleTimeout time.Duration
}

func (c *conn) Read(p []byte) (int, error) {
	if err := c.SetDeadline(time.Now().Add(c.idleTimeout)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

func (c *conn) Write(p []byte) (int, error) {
	if err := c.SetDeadline(time.Now().Add(c.idleTimeout)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// objectName returns the name of an object in the bucket.
func (s *Store) objectName(key string) *string {
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

// Put implements [blob.Backend]. Objects of up to 8 MiB are sent in one request, larger ones in
// parts.
func (s *Store) Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error {
	ifNoneMatch := aws.String("*")
	if replace || s.unconditional.Load() {
		ifNoneMatch = nil
	}
	if size > partSize {
		return s.upload(ctx, key, size, content, ifNoneMatch)
	}
	body := make([]byte, size)
	if err := readPart(content, body, true); err != nil {
		return err
	}
	put := func(ifNoneMatch *string) error {
		_, err := s.client.PutObject(ctx, &s3.PutObjectInput{
			Bucket: s.bucket(), Key: s.objectName(key), Body: bytes.NewReader(body), ContentLength: aws.Int64(size),
			IfNoneMatch:          ifNoneMatch,
			ServerSideEncryption: types.ServerSideEncryption(s.cfg.SSE), SSEKMSKeyId: optional(s.cfg.KMSKey),
		})
		return err
	}
	err := put(ifNoneMatch)
	if ifNoneMatch != nil && status(err) == http.StatusNotImplemented {
		s.unconditional.Store(true)
		err = put(nil)
	}
	return s.wrapError(ctx, "put", key, err)
}

// readPart fills part. If it is the last one, nothing may follow it.
func readPart(content io.Reader, part []byte, last bool) error {
	_, err := io.ReadFull(content, part)
	if err == nil && last {
		_, err = io.ReadFull(content, make([]byte, 1))
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err == nil:
			err = errors.New("it is longer than its size")
		}
	}
	if err != nil {
		return fmt.Errorf("read the content: %w", err)
	}
	return nil
}

// Get implements [blob.Backend].
func (s *Store) Get(ctx context.Context, key string, span blob.Span) (io.ReadCloser, error) {
	in := &s3.GetObjectInput{Bucket: s.bucket(), Key: s.objectName(key)}
	if !span.Whole() {
		in.Range = aws.String(fmt.Sprintf("bytes=%d-%d", span.Offset, span.Offset+span.Length-1))
	}
	out, err := s.client.GetObject(ctx, in)
	if err != nil {
		return nil, s.wrapError(ctx, "get", key, err)
	}
	err = s.checkResponse(out, key, span)
	if err != nil {
		_ = out.Body.Close()
		return nil, err
	}
	return &body{ReadCloser: out.Body, ctx: ctx, store: s, key: key}, nil
}

// checkResponse checks that the server returned the requested span.
func (s *Store) checkResponse(out *s3.GetObjectOutput, key string, span blob.Span) error {
	if span.Whole() {
		if n := out.ContentLength; n != nil && *n != span.Size {
			return &blob.Error{
				Op: "get", Key: key, Kind: proto.ErrCorrupt,
				Err: fmt.Errorf("it has %d bytes, want %d", *n, span.Size),
			}
		}
		return nil
	}
	want := fmt.Sprintf("bytes %d-%d/", span.Offset, span.Offset+span.Length-1)
	total, ok := strings.CutPrefix(aws.ToString(out.ContentRange), want)
	switch {
	case !ok:
		return &blob.Error{
			Op: "get", Key: key, Kind: proto.ErrCorrupt,
			Err: fmt.Errorf("requested %s%d, the server returned %.100q", want, span.Size, aws.ToString(out.ContentRange)),
		}
	case total != fmt.Sprint(span.Size) && total != "*":
		return &blob.Error{
			Op: "get", Key: key, Kind: proto.ErrCorrupt,
			Err: fmt.Errorf("it has %.20s bytes, want %d", total, span.Size),
		}
	}
	return nil
}

// body converts errors of a stream.
type body struct {
	io.ReadCloser
	ctx   context.Context // of the request being served
	store *Store
	key   string
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = b.store.wrapError(b.ctx, "get", b.key, err)
	}
	return n, err
}

// Stat implements [blob.Backend].
func (s *Store) Stat(ctx context.Context, key string) (blob.Entry, error) {
	out, err := s.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: s.bucket(), Key: s.objectName(key)})
	if err != nil {
		return blob.Entry{}, s.wrapError(ctx, "stat", key, err)
	}
	return blob.Entry{Key: key, Size: aws.ToInt64(out.ContentLength), Modified: aws.ToTime(out.LastModified)}, nil
}

// Delete implements [blob.Backend].
func (s *Store) Delete(ctx context.Context, key string) error {
	_, err := s.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: s.bucket(), Key: s.objectName(key)})
	err = s.wrapError(ctx, "delete", key, err)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}

// List implements [blob.Backend]. It skips names that are not keys.
func (s *Store) List(ctx context.Context, prefix, after string) iter.Seq2[blob.Entry, error] {
	return func(yield func(blob.Entry, error) bool) {
		in := &s3.ListObjectsV2Input{Bucket: s.bucket(), Prefix: s.objectName(prefix)}
		if after != "" {
			in.StartAfter = s.objectName(after)
		}
		pages := s3.NewListObjectsV2Paginator(s.client, in)
		for pages.HasMorePages() {
			page, err := pages.NextPage(ctx)
			if err != nil {
				yield(blob.Entry{}, s.wrapError(ctx, "list", prefix, err))
				return
			}
			for _, o := range page.Contents {
				key := strings.TrimPrefix(aws.ToString(o.Key), aws.ToString(s.objectName("")))
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
