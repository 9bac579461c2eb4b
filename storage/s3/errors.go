package s3

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"syscall"

	"github.com/aws/aws-sdk-go-v2/aws"
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

// credentials gives errors a type.
type credentials struct{ aws.CredentialsProvider }

// Retrieve is [aws.CredentialsProvider]'s.
func (c credentials) Retrieve(ctx context.Context) (aws.Credentials, error) {
	found, err := c.CredentialsProvider.Retrieve(ctx)
	if err != nil {
		err = &credentialsError{err}
	}
	return found, err
}

// credentialsError says that there are no credentials. It hides the cause, which may be the answer of a server that is not the store.
type credentialsError struct{ cause error }

func (e *credentialsError) Error() string { return e.cause.Error() }

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
	case "NoSuchUpload": // the answer to a try that completed it was lost: the object is there, as whoever looks for it will see
		e.Kind = proto.ErrExists
		return e
	case "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "RequestTimeout": // what arrived is not what was sent
		e.Again = true
		return e
	}
	if e.Do = s.mistake(code, err); e.Do != "" {
		return e
	}
	missing := code == "NoSuchKey"
	switch code := status(err); {
	case code == 0: // no answer, or one that broke
		e.Do, e.Again = s.unreached(err)
	// Other servers say so of other things, and an answer about one of ours without a body has no more than the status.
	case code == http.StatusNotFound && (missing || op == "stat"):
		e.Kind, e.Err = proto.ErrNotFound, nil
	case code == http.StatusPreconditionFailed:
		e.Kind = proto.ErrExists
	case code == http.StatusRequestedRangeNotSatisfiable:
		e.Kind = proto.ErrCorrupt
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		e.Do = "see that the credentials are right and may get, put, delete and list in the bucket, and that the clock is right"
	case code == http.StatusRequestTimeout, code == http.StatusConflict, code == http.StatusTooManyRequests, code >= 500 && code != http.StatusNotImplemented:
		e.Again = true
	case code >= 300:
		e.Do = "see that the store's URL names the right endpoint, with https:// where it speaks TLS, and the right region, and that its server speaks the S3 protocol"
	default:
		e.Again = true
	}
	return e
}

// mistake says what to do where a server's answer has the mark of a setting that is wrong; else it is empty.
func (s *Store) mistake(code string, err error) string {
	if answer, ok := errors.AsType[*smithyhttp.ResponseError](err); ok {
		region := answer.Response.Header.Get("X-Amz-Bucket-Region")
		wrong := answer.HTTPStatusCode() < 400 || answer.HTTPStatusCode() == http.StatusBadRequest
		if wrong && region != "" && region != s.cfg.Region {
			return fmt.Sprintf("the bucket is in another region than %.50q: write region=%.50s in the store's URL", s.cfg.Region, region)
		}
	}
	switch code {
	case "NoSuchBucket":
		return "make the bucket " + s.cfg.Bucket + ", or correct the store's URL"
	case "AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraintException":
		return fmt.Sprintf("the server expects another region than %.50q: correct region=… in the store's URL", s.cfg.Region)
	case "InvalidAccessKeyId", "XAdminUserNotFound": // the latter is versitygw's
		return "the server does not know the key: correct AWS_ACCESS_KEY_ID, or where else it comes from; or the endpoint in the store's URL"
	case "SignatureDoesNotMatch":
		return "the secret is not that of the key: correct AWS_SECRET_ACCESS_KEY, or where else it comes from"
	case "ExpiredToken":
		return "the credentials are valid no longer: renew AWS_SESSION_TOKEN with its key, or where else they come from"
	case "RequestTimeTooSkewed":
		return "set the clock of this machine"
	}
	return ""
}

// unreached says what to do where there is no answer, and whether the same request may succeed at once.
func (s *Store) unreached(err error) (do string, again bool) {
	endpoint := "Amazon's server"
	if s.cfg.Endpoint != "" {
		endpoint = "the server at " + s.cfg.Endpoint
	}
	if _, ok := errors.AsType[*credentialsError](err); ok {
		return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or another source of credentials that the AWS tools know", true
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return "name a file with who signed the certificate of " + endpoint + " in AWS_CA_BUNDLE, and the server as its certificate does", false
	}
	if name, ok := errors.AsType[*net.DNSError](err); ok {
		do = fmt.Sprintf("see that there is a host %.255s and that this machine can look it up; else correct endpoint=… or region=… in the store's URL", name.Name)
		if s.cfg.Endpoint != "" && !s.cfg.PathStyle {
			do += ", or add path_style=1, which most servers need that are not Amazon's"
		}
		return do, true
	}
	switch {
	case errors.Is(err, http.ErrSchemeMismatch):
		return "write http:// in endpoint=… of the store's URL where the server does not speak TLS", false
	case errors.Is(err, syscall.ECONNREFUSED):
		return "start " + endpoint + ", or correct endpoint=… in the store's URL", true
	}
	return "", true
}
