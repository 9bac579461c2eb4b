package s3

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"slices"
	"sync"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
)

// upload sends an object in parts, several at once, and retries each request. The object becomes
// visible with the last request.
func (s *Store) upload(ctx context.Context, key string, size int64, content io.Reader, ifNoneMatch *string) error {
	var id *string
	err := s.cfg.Retry.Do(ctx, func() error {
		out, err := s.client.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{
			Bucket: s.bucket(), Key: s.objectName(key),
			ServerSideEncryption: types.ServerSideEncryption(s.cfg.SSE), SSEKMSKeyId: optional(s.cfg.KMSKey),
		})
		if err != nil {
			return s.wrapError(ctx, "put", key, err)
		}
		id = out.UploadId
		return nil
	})
	if err != nil {
		return err
	}
	parts, err := s.sendParts(ctx, key, size, content, id)
	if err == nil {
		err = s.complete(ctx, key, id, parts, ifNoneMatch)
	}
	if err != nil {
		// Parts of an unfinished upload cost money. If this fails, they are left to the bucket's
		// lifecycle rule.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
		defer cancel()
		_, _ = s.client.AbortMultipartUpload(
			ctx, &s3.AbortMultipartUploadInput{Bucket: s.bucket(), Key: s.objectName(key), UploadId: id})
	}
	return err
}

// sendParts sends all parts and returns them in order.
func (s *Store) sendParts(
	ctx context.Context, key string, size int64, content io.Reader, id *string,
) ([]types.CompletedPart, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	each := max(partSize, (size+maxParts-1)/maxParts)
	parts := make([]types.CompletedPart, (size+each-1)/each)
	free := make(chan []byte, uploadConcurrency)
	for range min(uploadConcurrency, len(parts)) {
		free <- nil // allocated when needed: content may come slowly
	}
	var sending sync.WaitGroup
	defer sending.Wait()
	for i := range parts {
		var buffer []byte
		select {
		case buffer = <-free:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if buffer == nil {
			buffer = make([]byte, each)
		}
		part := buffer[:min(each, size-int64(i)*each)]
		if err := readPart(content, part, i == len(parts)-1); err != nil {
			stop(err)
			return nil, err
		}
		sending.Go(func() {
			var err error
			if parts[i], err = s.sendPart(ctx, key, id, i, part); err != nil {
				stop(err)
				return
			}
			free <- buffer
		})
	}
	sending.Wait()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return parts, nil
}

func (s *Store) sendPart(ctx context.Context, key string, id *string, i int, part []byte) (types.CompletedPart, error) {
	done := types.CompletedPart{PartNumber: aws.Int32(int32(i) + 1)}
	err := s.cfg.Retry.Do(ctx, func() error {
		out, err := s.client.UploadPart(ctx, &s3.UploadPartInput{
			Bucket: s.bucket(), Key: s.objectName(key), UploadId: id, PartNumber: done.PartNumber,
			Body: bytes.NewReader(part), ContentLength: aws.Int64(int64(len(part))),
		})
		if err != nil {
			return s.wrapError(ctx, "put", key, err)
		}
		done.ETag = out.ETag
		return nil
	})
	return done, err
}

// complete turns the parts into an object.
func (s *Store) complete(
	ctx context.Context, key string, id *string, parts []types.CompletedPart, ifNoneMatch *string,
) error {
	return s.cfg.Retry.Do(ctx, func() error {
		_, err := s.client.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{
			Bucket: s.bucket(), Key: s.objectName(key), UploadId: id, IfNoneMatch: ifNoneMatch,
			MultipartUpload: &types.CompletedMultipartUpload{Parts: slices.Clone(parts)},
		})
		if ifNoneMatch != nil && status(err) == http.StatusNotImplemented {
			s.unconditional.Store(true)
			ifNoneMatch = nil
			_, err = s.client.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{
				Bucket: s.bucket(), Key: s.objectName(key), UploadId: id, MultipartUpload: &types.CompletedMultipartUpload{
					Parts: slices.Clone(parts),
				},
			})
		}
		return s.wrapError(ctx, "put", key, err)
	})
}
