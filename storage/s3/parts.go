package s3

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"syscall"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// maxCopy is the maximum size of an object that servers copy in one request, in bytes.
	maxCopy = 5 << 30
	// copyPart is the size of the parts in which larger ones are copied.
	copyPart = 1 << 30
	// maxTag is the length of the longest tag of a part, in bytes. The tags of all parts are kept.
	maxTag = 1 << 10
	// maxUploaded is how many parts an upload of [Files] has at most.
	maxUploaded = int(proto.MaxFileBytes / proto.UploadPartBytes)
)

// newPart returns a part for the completion of an upload. The server chose the tag.
func newPart(number *int32, tag *string) (types.CompletedPart, error) {
	if number == nil || len(aws.ToString(tag)) > maxTag {
		return types.CompletedPart{},
			fmt.Errorf("the server answered about a part without a number, or with a tag of more than %d bytes: %w", maxTag,
				syscall.EIO)
	}
	return types.CompletedPart{PartNumber: number, ETag: tag}, nil
}

func (b *Bucket) beginParts(ctx context.Context, key *string) (id string, err error) {
	ctx, cancel := limited(ctx, 0)
	defer cancel()
	out, err := b.client.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{Bucket: &b.bucket, Key: key})
	if err != nil {
		return "", bucketError("put", err)
	}
	return aws.ToString(out.UploadId), nil
}

// sendPart sends a part of size bytes. The parts of an upload are numbered from 1.
func (b *Bucket) sendPart(
	ctx context.Context, key *string, id string, number int, size int64, content io.ReadSeeker,
) (types.CompletedPart, error) {
	n := int32(number)
	out, err := b.client.UploadPart(ctx, &s3.UploadPartInput{
		Bucket: &b.bucket, Key: key, UploadId: &id, PartNumber: &n, Body: content, ContentLength: &size,
	})
	if err != nil {
		return types.CompletedPart{}, bucketError("put", err)
	}
	return newPart(&n, out.ETag)
}

// completeParts turns the parts of an upload into an object and returns its tag.
func (b *Bucket) completeParts(
	ctx context.Context, key *string, id string, parts []types.CompletedPart,
) (tag string, err error) {
	out, err := b.client.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{
		Bucket: &b.bucket, Key: key, UploadId: &id, MultipartUpload: &types.CompletedMultipartUpload{Parts: parts},
	})
	if err != nil {
		return "", bucketError("put", err)
	}
	return aws.ToString(out.ETag), nil
}

func (b *Bucket) abortParts(ctx context.Context, key *string, id string) error {
	ctx, cancel := limited(ctx, 0)
	defer cancel()
	_, err := b.client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: &b.bucket, Key: key, UploadId: &id})
	return bucketError("abort the upload of", err)
}

// abortFailed aborts an upload after an error. If that fails too, the parts are left to a rule of
// the bucket.
func (b *Bucket) abortFailed(ctx context.Context, key *string, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
	defer cancel()
	_ = b.abortParts(ctx, key, id)
}

// PutStream stores size bytes of content under a name. It reads content once. The object appears, or
// replaces another, when it is complete. Objects of more than 8 MiB are sent in parts, with three
// parts in memory.
func (b *Bucket) PutStream(ctx context.Context, name string, size int64, content io.Reader) error {
	key, err := b.key(name)
	if err != nil {
		return err
	}
	if size > partSize {
		return b.streamParts(ctx, key, size, content)
	}
	var whole bytes.Buffer // grows with the content, not with the announced size
	if _, err := io.CopyN(&whole, content, size); err != nil {
		return readError(err)
	}
	ctx, cancel := limited(ctx, size)
	defer cancel()
	_, err = b.Put(ctx, name, size, bytes.NewReader(whole.Bytes()))
	return err
}

// readError returns the error for missing or surplus content, otherwise the reader's.
func readError(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("read the content: %w", err)
}

func (b *Bucket) streamParts(ctx context.Context, key *string, size int64, content io.Reader) (err error) {
	id, err := b.beginParts(ctx, key)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			b.abortFailed(ctx, key, id)
		}
	}()
	each := max(partSize, (size+maxParts-1)/maxParts)
	parts := make([]types.CompletedPart, (size+each-1)/each)
	sending, sendCtx := errgroup.WithContext(ctx)
	sending.SetLimit(uploadConcurrency - 1) // one more is being read
	for i := range parts {
		part := make([]byte, min(each, size-int64(i)*each))
		if _, err = io.ReadFull(content, part); err != nil {
			err = readError(err)
			break
		}
		if sendCtx.Err() != nil {
			break
		}
		sending.Go(func() (err error) {
			sendCtx, cancel := limited(sendCtx, int64(len(part)))
			defer cancel()
			parts[i], err = b.sendPart(sendCtx, key, id, i+1, int64(len(part)), bytes.NewReader(part))
			return err
		})
	}
	if errSending := sending.Wait(); errSending != nil || err != nil {
		return errors.Join(err, errSending)
	}
	_, err = b.completeParts(ctx, key, id, parts)
	return err
}

// CopyObject copies an object within the bucket, at the server. The error is ESTALE if the object
// has another tag by now.
func (b *Bucket) CopyObject(ctx context.Context, o proto.StoredObject, to string) error {
	if o.Size > maxCopy {
		return b.copyParts(ctx, o, to, copyPart)
	}
	return b.copy(ctx, o, to)
}

// copySource returns the name of an object for requests that copy it.
func (b *Bucket) copySource(name string) (*string, error) {
	key, err := b.key(name)
	if err != nil {
		return nil, err
	}
	escaped := (&url.URL{Path: b.bucket + "/" + *key}).EscapedPath()
	escaped = strings.ReplaceAll(escaped, "+", "%2B") // some servers decode a plus sign as a space
	return &escaped, nil
}

// copyParts copies an object in parts of a size.
func (b *Bucket) copyParts(ctx context.Context, o proto.StoredObject, to string, each int64) (err error) {
	if o.Size/each >= maxParts { // the server chose the size, and each part takes memory
		return fmt.Errorf("copy an object of %d bytes: %w", o.Size, syscall.EFBIG)
	}
	source, err := b.copySource(o.Name)
	if err != nil {
		return err
	}
	key, err := b.key(to)
	if err != nil {
		return err
	}
	id, err := b.beginParts(ctx, key)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			b.abortFailed(ctx, key, id)
		}
	}()
	parts := make([]types.CompletedPart, (o.Size+each-1)/each)
	copying, copyCtx := errgroup.WithContext(ctx)
	copying.SetLimit(uploadConcurrency)
	for i := range parts {
		copying.Go(func() error {
			number, first := int32(i+1), int64(i)*each
			in := &s3.UploadPartCopyInput{
				Bucket: &b.bucket, Key: key, UploadId: &id, PartNumber: &number, CopySource: source,
				CopySourceIfMatch: optional(o.Tag),
				CopySourceRange:   aws.String(fmt.Sprintf("bytes=%d-%d", first, min(first+each, o.Size)-1)),
			}
			out, err := b.client.UploadPartCopy(copyCtx, in)
			if err != nil {
				return bucketError("copy", err)
			}
			if out.CopyPartResult == nil {
				return errors.New("copy an object: the response has no tag")
			}
			parts[i], err = newPart(&number, out.CopyPartResult.ETag)
			return err
		})
	}
	if err := copying.Wait(); err != nil {
		return err
	}
	_, err = b.completeParts(ctx, key, id, parts)
	return err
}

// BeginUpload begins a multipart upload of a file, and returns its id.
func (f *Files) BeginUpload(ctx context.Context, name string, size int64) (id string, err error) {
	if err := f.CheckPut(ctx, name, size); err != nil {
		return "", err
	}
	key, err := f.Bucket.key(name)
	if err != nil {
		return "", err
	}
	return f.Bucket.beginParts(ctx, key)
}

// PutPart stores a part of an upload, replacing an earlier one with its number. Numbers begin with
// 1.
func (f *Files) PutPart(ctx context.Context, name, id string, number int, content []byte) error {
	key, err := f.Bucket.key(name)
	if err != nil {
		return err
	}
	ctx, cancel := limited(ctx, int64(len(content)))
	defer cancel()
	_, err = f.Bucket.sendPart(ctx, key, id, number, int64(len(content)), bytes.NewReader(content))
	if errors.Is(err, syscall.EIO) {
		// A server may hang up before it has read the part, so that its answer is lost.
		in := &s3.ListPartsInput{Bucket: &f.Bucket.bucket, Key: key, UploadId: &id, MaxParts: aws.Int32(1)}
		if _, errList := f.partsPage(ctx, in); errors.Is(errList, proto.ErrNotFound) {
			return errList
		}
	}
	return uploadError(err)
}

// uploadError turns the error about an upload that does not exist into [proto.ErrNotFound].
func uploadError(err error) error {
	if errors.Is(err, errNoUpload) {
		return fmt.Errorf("%w: %w", err, proto.ErrNotFound)
	}
	return err
}

// UploadedParts returns the parts of an upload by number. The error is EIO if the server lists more
// than an upload can have.
func (f *Files) UploadedParts(ctx context.Context, name, id string) ([]proto.UploadedPart, error) {
	parts, _, err := f.parts(ctx, name, id)
	return parts, err
}

func (f *Files) parts(
	ctx context.Context, name, id string,
) (parts []proto.UploadedPart, completed []types.CompletedPart, err error) {
	key, err := f.Bucket.key(name)
	if err != nil {
		return nil, nil, err
	}
	in := &s3.ListPartsInput{Bucket: &f.Bucket.bucket, Key: key, UploadId: &id, MaxParts: aws.Int32(listPage)}
	for {
		out, err := f.partsPage(ctx, in)
		if err != nil {
			return nil, nil, err
		}
		for _, p := range out.Parts {
			part, err := newPart(p.PartNumber, p.ETag)
			if err != nil {
				return nil, nil, fmt.Errorf("list the parts of an upload: %w", err)
			}
			if len(parts) == maxUploaded {
				return nil, nil, fmt.Errorf("list the parts of an upload: the server has more than %d: %w", maxUploaded,
					syscall.EIO)
			}
			parts = append(parts, proto.UploadedPart{Number: int(*p.PartNumber), Size: aws.ToInt64(p.Size)})
			completed = append(completed, part)
		}
		// A page without parts would let a server continue forever.
		if !aws.ToBool(out.IsTruncated) || aws.ToString(out.NextPartNumberMarker) == aws.ToString(in.PartNumberMarker) ||
			len(out.Parts) == 0 {
			break
		}
		in.PartNumberMarker = out.NextPartNumberMarker
	}
	slices.SortFunc(parts, func(a, b proto.UploadedPart) int { return cmp.Compare(a.Number, b.Number) })
	slices.SortFunc(completed, func(a, b types.CompletedPart) int { return cmp.Compare(*a.PartNumber, *b.PartNumber) })
	return parts, completed, nil
}

func (f *Files) partsPage(ctx context.Context, in *s3.ListPartsInput) (*s3.ListPartsOutput, error) {
	ctx, cancel := limited(ctx, 0)
	defer cancel()
	out, err := f.Bucket.client.ListParts(ctx, in)
	if err != nil {
		return nil, uploadError(bucketError("list the parts of", err))
	}
	return out, nil
}

// CompleteUpload turns the parts of an upload into the file, if check accepts them.
func (f *Files) CompleteUpload(ctx context.Context, name, id string, check func([]proto.UploadedPart) error) error {
	parts, completed, err := f.parts(ctx, name, id)
	if err == nil {
		err = check(parts)
	}
	if err == nil {
		err = f.CheckPut(ctx, name, 0)
	}
	if err != nil {
		return err
	}
	key, err := f.Bucket.key(name)
	if err != nil {
		return err
	}
	_, err = f.Bucket.completeParts(ctx, key, id, completed)
	return uploadError(err)
}

// AbortUpload removes an upload with its parts.
func (f *Files) AbortUpload(ctx context.Context, name, id string) error {
	key, err := f.Bucket.key(name)
	if err != nil {
		return err
	}
	return uploadError(f.Bucket.abortParts(ctx, key, id))
}
