package s3

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go"
	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// putPartSize is the size of the parts of large objects in bytes, unless there would be more than
	// maxParts. Parts are read from the caller's file when they are sent, and take no memory.
	putPartSize = 16 << 20
	// bucketAttempts is how often a request with a transient failure is sent.
	bucketAttempts = 3
	bucketBackoff  = time.Second
	// maxResponse bounds a response without content, in bytes. The largest is a list page of 1,000
	// entries, of listEntry bytes each: keys have up to 1,024 bytes, and the encoding can triple them.
	maxResponse = 4 << 20
	listEntry   = 4 << 10
	// maxResponseHeader is the size of the header of a response, in bytes.
	maxResponseHeader = 64 << 10
	// maxToken is the length of the longest token that continues a list, in bytes. Servers encode the
	// last key, of up to 1,024 bytes, in it.
	maxToken = 8 << 10
)

// limitedResponses ends responses that are too long. The server belongs to a tenant.
type limitedResponses struct{ http.RoundTripper }

// RoundTrip implements [http.RoundTripper].
func (l limitedResponses) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := l.RoundTripper.RoundTrip(r)
	// Only content is requested with a range, and its readers know its size.
	if err == nil && (r.Header.Get("Range") == "" || resp.StatusCode >= http.StatusMultipleChoices) {
		resp.Body = http.MaxBytesReader(nil, resp.Body, responseLimit(r.URL.Query()))
	}
	return resp, err
}

// responseLimit returns the size of the largest response to a request, in bytes. Decoding makes
// lists many times as large.
func responseLimit(query url.Values) int64 {
	entries, err := strconv.ParseInt(cmp.Or(query.Get("max-keys"), query.Get("max-parts")), 10, 64)
	if err != nil {
		return maxResponse
	}
	return min(maxResponse, max(entries, listPage)*listEntry)
}

// BucketConfig configures a [Bucket].
type BucketConfig struct {
	proto.S3Mount
	Credentials proto.S3Credentials
	// Prefix is in front of every key, without slashes at its ends. Empty is the whole bucket.
	Prefix string
	// Dial connects to the server; nil for any address.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// MaxConns limits the connections to the server at a time; 0 is no limit.
	MaxConns int
}

// Bucket is a part of a tenant's bucket. Names are paths below its prefix, see
// [proto.ValidObjectName], and "" is the prefix itself. No request concerns a key outside of the
// prefix. Unlike a [Store], it uses no credentials of this process or machine.
//
// Errors wrap fs.ErrNotExist, fs.ErrPermission, os.ErrDeadlineExceeded, a syscall.Errno, or none of
// them. Their text has neither keys nor credentials, but it may have the server's.
type Bucket struct {
	client    *s3.Client
	transport *http.Transport
	bucket    string
	prefix    string // with a slash at its end, or empty
}

// OpenBucket returns a bucket. It sends no request.
func OpenBucket(cfg BucketConfig) (*Bucket, error) {
	if cfg.Prefix != "" && !proto.ValidObjectName(cfg.Prefix) {
		return nil, errors.New("open the bucket: its prefix is not valid")
	}
	dial := cfg.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: dialTimeout}).DialContext
	}
	transport := awshttp.NewBuildableClient().WithTransportOptions(func(t *http.Transport) {
		t.Proxy = nil // Dial would check the address of the proxy
		t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &conn{Conn: c, idleTimeout: DefaultIdleTimeout}, nil
		}
		t.MaxConnsPerHost = cfg.MaxConns
		t.ReadBufferSize = 64 << 10
		t.MaxResponseHeaderBytes = maxResponseHeader
	}).GetTransport()
	keys := aws.Credentials{
		AccessKeyID: cfg.Credentials.AccessKeyID, SecretAccessKey: cfg.Credentials.SecretAccessKey,
		SessionToken: cfg.Credentials.SessionToken,
	}
	options := s3.Options{
		Region: cfg.Region, UsePathStyle: cfg.PathStyle,
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) { return keys, nil }),
		HTTPClient: &http.Client{
			Transport:     limitedResponses{transport},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		Retryer: retry.NewStandard(func(o *retry.StandardOptions) {
			o.MaxAttempts, o.MaxBackoff = bucketAttempts, bucketBackoff
		}),
		// As in a Store.
		RequestChecksumCalculation: aws.RequestChecksumCalculationWhenRequired,
		ResponseChecksumValidation: aws.ResponseChecksumValidationWhenRequired,
	}
	if cfg.Endpoint != "" {
		options.BaseEndpoint = aws.String(cfg.Endpoint)
	}
	b := &Bucket{client: s3.New(options), transport: transport, bucket: cfg.Bucket}
	if cfg.Prefix != "" {
		b.prefix = cfg.Prefix + "/"
	}
	return b, nil
}

// Close closes idle connections.
func (b *Bucket) Close() error {
	b.transport.CloseIdleConnections()
	return nil
}

// key returns the key of a name, which may end with a slash.
func (b *Bucket) key(name string) (*string, error) {
	if !proto.ValidObjectName(strings.TrimSuffix(name, "/")) {
		return nil, fmt.Errorf("an object's name is not valid: %w", syscall.EINVAL)
	}
	if !utf8.ValidString(name) {
		return nil, fmt.Errorf("an object's name is not UTF-8: %w", syscall.EILSEQ)
	}
	if len(b.prefix)+len(name) > proto.MaxObjectKey {
		return nil, fmt.Errorf("an object's key is longer than %d bytes: %w", proto.MaxObjectKey, syscall.ENAMETOOLONG)
	}
	return aws.String(b.prefix + name), nil
}

// dirKey returns the prefix of the keys in a directory.
func (b *Bucket) dirKey(dir string) (string, error) {
	if dir == "" {
		return b.prefix, nil
	}
	key, err := b.key(dir + "/")
	return aws.ToString(key), err
}

// List returns one page of objects and directories in a directory, with their names in it. most is
// the page size requested from the server; more is an error, except that 200 are always accepted.
// The name of the directory's own marker is empty. next continues after the page; it is empty at
// the end. The server chose the names, so they may be anything.
func (b *Bucket) List(
	ctx context.Context, dir, after string, most int32,
) (objects []proto.StoredObject, dirs []string, next string, err error) {
	prefix, err := b.dirKey(dir)
	if err != nil {
		return nil, nil, "", err
	}
	in := &s3.ListObjectsV2Input{
		Bucket: &b.bucket, Prefix: &prefix, Delimiter: aws.String("/"), MaxKeys: &most, EncodingType: types.EncodingTypeUrl,
	}
	if after != "" {
		in.ContinuationToken = &after
	}
	out, err := b.client.ListObjectsV2(ctx, in)
	if err != nil {
		return nil, nil, "", bucketError("list", err)
	}
	name := func(key *string) (string, bool) {
		text := aws.ToString(key)
		if out.EncodingType == types.EncodingTypeUrl {
			if text, err = url.QueryUnescape(text); err != nil {
				return "", false
			}
		}
		return strings.CutPrefix(text, prefix)
	}
	// What asks for less than a page uses a part of one.
	if sent, limit := len(out.Contents)+len(out.CommonPrefixes), max(int(most), listPage); sent > limit {
		return nil, nil, "", fmt.Errorf("list objects: the server sent %d entries, and was asked for no more than %d: %w",
			sent, limit, syscall.EIO)
	}
	for _, o := range out.Contents {
		if n, ok := name(o.Key); ok {
			objects = append(objects, proto.StoredObject{
				Name: n, Size: max(aws.ToInt64(o.Size), 0), Modified: aws.ToTime(o.LastModified), Tag: aws.ToString(o.ETag),
			})
		}
	}
	for _, p := range out.CommonPrefixes {
		if n, ok := name(p.Prefix); ok {
			dirs = append(dirs, strings.TrimSuffix(n, "/"))
		}
	}
	if aws.ToBool(out.IsTruncated) {
		next = aws.ToString(out.NextContinuationToken)
	}
	if len(next) > maxToken {
		return nil, nil, "", fmt.Errorf("list objects: the server's token for the next page is longer than %d bytes: %w",
			maxToken, syscall.EIO)
	}
	return objects, dirs, next, nil
}

// Stat describes an object.
func (b *Bucket) Stat(ctx context.Context, name string) (proto.StoredObject, error) {
	key, err := b.key(name)
	if err != nil {
		return proto.StoredObject{}, err
	}
	out, err := b.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &b.bucket, Key: key})
	if err != nil {
		return proto.StoredObject{}, bucketError("stat", err)
	}
	return proto.StoredObject{
		Name: name, Size: max(aws.ToInt64(out.ContentLength), 0),
		Modified: aws.ToTime(out.LastModified), Tag: aws.ToString(out.ETag),
	}, nil
}

// Open returns n bytes of an object from an offset. The error is ESTALE if the object has another
// tag by now.
func (b *Bucket) Open(ctx context.Context, o proto.StoredObject, offset, n int64) (io.ReadCloser, error) {
	key, err := b.key(o.Name)
	if err != nil {
		return nil, err
	}
	in := &s3.GetObjectInput{
		Bucket: &b.bucket, Key: key, Range: aws.String(fmt.Sprintf("bytes=%d-%d", offset, offset+n-1)),
	}
	if o.Tag != "" {
		in.IfMatch = &o.Tag
	}
	out, err := b.client.GetObject(ctx, in)
	if err != nil {
		return nil, bucketError("get", err)
	}
	// A server may ignore the range or the condition.
	whole := offset == 0 && n == o.Size && aws.ToString(out.ContentRange) == "" && aws.ToInt64(out.ContentLength) == n
	if !whole && !strings.HasPrefix(aws.ToString(out.ContentRange), fmt.Sprintf("bytes %d-%d/", offset, offset+n-1)) {
		_ = out.Body.Close()
		return nil, fmt.Errorf("get an object: the server returned another range: %w", syscall.EIO)
	}
	if o.Tag != "" && aws.ToString(out.ETag) != o.Tag {
		_ = out.Body.Close()
		return nil, fmt.Errorf("get an object: it was replaced: %w", syscall.ESTALE)
	}
	return &bucketBody{out.Body}, nil
}

type bucketBody struct{ io.ReadCloser }

func (r *bucketBody) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = bucketError("get", err)
	}
	return n, err
}

// Put stores size bytes of content under a name, which may end with a slash. The object appears, or
// replaces another, when it is complete. Objects of more than 16 MiB are sent in parts.
func (b *Bucket) Put(ctx context.Context, name string, size int64, content io.ReaderAt) (proto.StoredObject, error) {
	key, err := b.key(name)
	if err != nil {
		return proto.StoredObject{}, err
	}
	stored := proto.StoredObject{Name: name, Size: size, Modified: time.Now()}
	if size > putPartSize {
		if stored.Tag, err = b.putParts(ctx, key, size, content); err != nil {
			return proto.StoredObject{}, err
		}
		return stored, nil
	}
	out, err := b.client.PutObject(ctx, &s3.PutObjectInput{
		Bucket: &b.bucket, Key: key, Body: io.NewSectionReader(content, 0, size), ContentLength: &size,
	})
	if err != nil {
		return proto.StoredObject{}, bucketError("put", err)
	}
	stored.Tag = aws.ToString(out.ETag)
	return stored, nil
}

func (b *Bucket) putParts(ctx context.Context, key *string, size int64, content io.ReaderAt) (tag string, err error) {
	id, err := b.beginParts(ctx, key)
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			b.abortFailed(ctx, key, id)
		}
	}()
	each := max(putPartSize, (size+maxParts-1)/maxParts)
	parts := make([]types.CompletedPart, (size+each-1)/each)
	sending, sendCtx := errgroup.WithContext(ctx)
	sending.SetLimit(uploadConcurrency)
	for i := range parts {
		sending.Go(func() (err error) {
			offset := int64(i) * each
			n := min(each, size-offset)
			parts[i], err = b.sendPart(sendCtx, key, id, i+1, n, io.NewSectionReader(content, offset, n))
			return err
		})
	}
	if err := sending.Wait(); err != nil {
		return "", err
	}
	return b.completeParts(ctx, key, id, parts)
}

// Copy copies an object within the bucket, at the server. Servers copy at most 5 GiB.
func (b *Bucket) Copy(ctx context.Context, from, to string) error {
	return b.copy(ctx, proto.StoredObject{Name: from}, to)
}

func (b *Bucket) copy(ctx context.Context, o proto.StoredObject, to string) error {
	source, err := b.copySource(o.Name)
	if err != nil {
		return err
	}
	key, err := b.key(to)
	if err != nil {
		return err
	}
	_, err = b.client.CopyObject(
		ctx, &s3.CopyObjectInput{Bucket: &b.bucket, Key: key, CopySource: source, CopySourceIfMatch: optional(o.Tag)})
	return bucketError("copy", err)
}

// Delete removes an object. It is no error if there is none.
func (b *Bucket) Delete(ctx context.Context, name string) error {
	key, err := b.key(name)
	if err != nil {
		return err
	}
	_, err = b.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &b.bucket, Key: key})
	if err = bucketError("delete", err); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// errNoUpload means that an upload in parts was completed or aborted, or never existed.
var errNoUpload = errors.New("there is no such upload")

// bucketError converts an error of the SDK. Its text is short: the SDK's may have keys and parts of
// responses.
func bucketError(op string, err error) error {
	if err == nil {
		return nil
	}
	code := ""
	if response, ok := errors.AsType[smithy.APIError](err); ok {
		code = response.ErrorCode()
	}
	text := fmt.Sprintf("%s an object: status %d %.40q", op, status(err), code)
	var cause error = syscall.EIO
	switch status := status(err); {
	case errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded):
		cause = os.ErrDeadlineExceeded
	// The response to HEAD has no code of its own. Some servers also respond with 404 for other
	// unknown things than keys, such as access keys.
	case code == "NoSuchKey" || code == "NotFound" && op == "stat":
		cause = fs.ErrNotExist
	case code == "NoSuchUpload":
		cause = errNoUpload
	case code == "XAdminUserNotFound" || status == http.StatusUnauthorized || status == http.StatusForbidden:
		cause = fs.ErrPermission
	case status == http.StatusPreconditionFailed:
		cause = syscall.ESTALE
	case code == "EntityTooLarge":
		cause = syscall.EFBIG
	case status == http.StatusInsufficientStorage || strings.Contains(code, "Quota"):
		cause = syscall.ENOSPC
	case status == 0:
		text = op + " an object: no response"
	}
	return fmt.Errorf("%s: %w", text, cause)
}
