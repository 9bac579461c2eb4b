package s3

import (
	"context"
	"errors"
	"net/http"

	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/blob"
)

// status gives the HTTP status of the answer that an error is, or 0 if it is none.
func status(err error) int {
	if answer, ok := errors.AsType[*smithyhttp.ResponseError](err); ok {
		return answer.HTTPStatusCode()
	}
	return 0
}

// explain says what an error of the SDK means.
func (s *Store) explain(ctx context.Context, op, key string, err error) error {
	if err == nil {
		return nil
	}
	e := &blob.Error{Op: op, Key: key, Kind: blob.ErrUnavailable, Err: err}
	if ctx.Err() != nil {
		e.Err = errors.Join(context.Cause(ctx), err)
		return e
	}
	code := ""
	if answer, ok := errors.AsType[smithy.APIError](err); ok {
		code = answer.ErrorCode()
	}
	switch code {
	case "NoSuchBucket":
		e.Do = "make the bucket " + s.cfg.Bucket + ", or correct the store's URL"
		return e
	case "NoSuchUpload": // the answer to a try that completed it was lost: the object is there, as whoever looks for it will see
		e.Kind = proto.ErrExists
		return e
	case "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "RequestTimeout": // what arrived is not what was sent
		e.Again = true
		return e
	}
	switch code := status(err); {
	case code == http.StatusNotFound:
		e.Kind, e.Err = proto.ErrNotFound, nil
	case code == http.StatusPreconditionFailed:
		e.Kind = proto.ErrExists
	case code == http.StatusRequestedRangeNotSatisfiable:
		e.Kind = blob.ErrCorrupt
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		e.Do = "see that the credentials are right and may get, put, delete and list in the bucket, and that the clock is right"
	case code == http.StatusRequestTimeout, code == http.StatusConflict, code == http.StatusTooManyRequests, code >= 500 && code != http.StatusNotImplemented:
		e.Again = true
	case code >= 300:
		e.Do = "see that the store's URL names the right endpoint and region, and that its server speaks the S3 protocol"
	default: // no answer, or one that broke
		e.Again = true
	}
	return e
}
