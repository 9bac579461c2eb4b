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

// status returns the HTTP status of an error, or 0 if the server did not respond.
func status(err error) int {
	if response, ok := errors.AsType[*smithyhttp.ResponseError](err); ok {
		return response.HTTPStatusCode()
	}
	return 0
}

// credentials wraps errors in [credentialsError].
type credentials struct{ aws.CredentialsProvider }

// Retrieve implements [aws.CredentialsProvider].
func (c credentials) Retrieve(ctx context.Context) (aws.Credentials, error) {
	found, err := c.CredentialsProvider.Retrieve(ctx)
	if err != nil {
		err = &credentialsError{err}
	}
	return found, err
}

// credentialsError means that there are no credentials. It does not unwrap, since the cause may be
// the response of another server.
type credentialsError struct{ cause error }

func (e *credentialsError) Error() string { return e.cause.Error() }

// wrapError converts an error of the SDK.
func (s *Store) wrapError(ctx context.Context, op, key string, err error) error {
	if err == nil {
		return nil
	}
	e := &blob.Error{Op: op, Key: key, Kind: blob.ErrUnavailable, Err: err}
	if ctx.Err() != nil {
		e.Err = errors.Join(context.Cause(ctx), err)
		return e
	}
	code := ""
	if response, ok := errors.AsType[smithy.APIError](err); ok {
		code = response.ErrorCode()
	}
	switch code {
	case "NoSuchUpload": // an earlier attempt completed it and its response was lost; the caller finds the object
		e.Kind = proto.ErrExists
		return e
	case "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "RequestTimeout": // damaged in transit
		e.Retryable = true
		return e
	}
	if e.Remedy = s.configRemedy(code, err); e.Remedy != "" {
		return e
	}
	missing := code == "NoSuchKey"
	switch code := status(err); {
	case code == 0: // no response, or a broken one
		e.Remedy, e.Retryable = s.connectionRemedy(err)
	// Some servers respond with 404 about other things than keys; the response to HEAD has no body
	// with a code.
	case code == http.StatusNotFound && (missing || op == "stat"):
		e.Kind, e.Err = proto.ErrNotFound, nil
	case code == http.StatusPreconditionFailed:
		e.Kind = proto.ErrExists
	case code == http.StatusRequestedRangeNotSatisfiable:
		e.Kind = proto.ErrCorrupt
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		e.Remedy = "check that the credentials are valid and may get, put, delete and list in the bucket, and that the " +
			"clock is right"
	case code == http.StatusRequestTimeout, code == http.StatusConflict, code == http.StatusTooManyRequests, code >= 500 &&
		code != http.StatusNotImplemented:
		e.Retryable = true
	case code >= 300:
		e.Remedy = "check that the store's URL has the right endpoint, with https:// if it speaks TLS, and the right " +
			"region, and that the server speaks the S3 protocol"
	default:
		e.Retryable = true
	}
	return e
}

// configRemedy returns the remedy if a server's response indicates a wrong setting, otherwise "".
func (s *Store) configRemedy(code string, err error) string {
	if response, ok := errors.AsType[*smithyhttp.ResponseError](err); ok {
		region := response.Response.Header.Get("X-Amz-Bucket-Region")
		wrong := response.HTTPStatusCode() < 400 || response.HTTPStatusCode() == http.StatusBadRequest
		if wrong && region != "" && region != s.cfg.Region {
			return fmt.Sprintf("the bucket is not in the region %.50q: write region=%.50s in the store's URL",
				s.cfg.Region, region)
		}
	}
	switch code {
	case "NoSuchBucket":
		return "make the bucket " + s.cfg.Bucket + ", or correct the store's URL"
	case "AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraintException":
		return fmt.Sprintf("the server expects another region, not %.50q: correct region=… in the store's URL", s.cfg.Region)
	case "InvalidAccessKeyId", "XAdminUserNotFound": // the latter is from versitygw
		return "the server does not know the access key: correct AWS_ACCESS_KEY_ID or its other source, or the endpoint " +
			"in the store's URL"
	case "SignatureDoesNotMatch":
		return "the secret does not match the access key: correct AWS_SECRET_ACCESS_KEY or its other source"
	case "ExpiredToken":
		return "the credentials have expired: renew AWS_SESSION_TOKEN and its key, or their other source"
	case "RequestTimeTooSkewed":
		return "set the clock of this machine"
	}
	return ""
}

// connectionRemedy returns the remedy if there is no response, and whether the request is
// retryable.
func (s *Store) connectionRemedy(err error) (remedy string, retryable bool) {
	endpoint := "Amazon's server"
	if s.cfg.Endpoint != "" {
		endpoint = "the server at " + s.cfg.Endpoint
	}
	if _, ok := errors.AsType[*credentialsError](err); ok {
		return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or another source of credentials that the AWS tools know",
			true
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return "set AWS_CA_BUNDLE to a file with the authority that signed the certificate of " + endpoint +
			", and use the host name in its certificate", false
	}
	if name, ok := errors.AsType[*net.DNSError](err); ok {
		remedy = fmt.Sprintf("check that the host %.255s exists and that this machine can resolve it; else correct "+
			"endpoint=… or region=… in the store's URL", name.Name)
		if s.cfg.Endpoint != "" && !s.cfg.PathStyle {
			remedy += ", or add path_style=1, which most servers other than Amazon's need"
		}
		return remedy, true
	}
	switch {
	case errors.Is(err, http.ErrSchemeMismatch):
		return "write http:// in endpoint=… of the store's URL if the server does not speak TLS", false
	case errors.Is(err, syscall.ECONNREFUSED):
		return "start " + endpoint + ", or correct endpoint=… in the store's URL", true
	}
	return "", true
}
