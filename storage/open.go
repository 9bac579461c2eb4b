// Package storage opens blob stores by URL. The stores are in package blob and in one package for
// each technology.
package storage

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/s3"
)

const urlForms = "file:///directory or s3://bucket/prefix?endpoint=…&region=…&path_style=1&sse=…&kms_key=…"

// Open opens the blob store at a URL: file:///directory, created if necessary, or
// s3://bucket/prefix with these optional parameters:
//
//   - endpoint: URL of a server other than Amazon's
//   - region: region of the bucket
//   - path_style: 1 if the bucket is in the path of URLs instead of the host name
//   - sse: server-side encryption: AES256, aws:kms or aws:kms:dsse
//   - kms_key: the key for that
//
// The URL holds no credentials. If keyFile is not empty, all content is encrypted with its key,
// made by age-keygen. Open reports configuration errors only: it sends no request to a server.
func Open(ctx context.Context, location, keyFile string) (*blob.Store, error) {
	backend, err := open(ctx, location)
	if err != nil {
		return nil, err
	}
	store := &blob.Store{Backend: backend, Retry: blob.DefaultRetry()}
	if keyFile == "" {
		return store, nil
	}
	encrypted, err := blob.Encrypt(backend, keyFile)
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	store.Backend = encrypted
	return store, nil
}

// Check reports errors in a URL without opening anything.
func Check(location string) error {
	_, err := parse(location)
	return err
}

func open(ctx context.Context, location string) (blob.Backend, error) {
	to, err := parse(location)
	switch {
	case err != nil:
		return nil, err
	case to.directory != "":
		return blob.OpenDirectory(to.directory)
	default:
		return s3.Open(ctx, to.s3)
	}
}

// target is a parsed URL: a directory, or a bucket.
type target struct {
	directory string
	s3        s3.Config
}

func parse(location string) (to target, err error) {
	u, err := url.Parse(location)
	if err != nil { // its text would repeat the URL, perhaps with a password
		return target{}, errors.New("the URL of the store is malformed: use " + urlForms)
	}
	if u.User != nil {
		return target{}, errors.New(
			"the URL of the store contains credentials: remove them and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY " +
				"or another source that the AWS tools use")
	}
	invalid := func(format string, args ...any) error {
		shown := url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path} // parameters may hold a password
		return fmt.Errorf("the URL of the store, %q: %s: use %s", shown.String(), fmt.Sprintf(format, args...), urlForms)
	}
	parameters, err := url.ParseQuery(u.RawQuery)
	if err != nil || u.Fragment != "" || u.Opaque != "" {
		return target{}, invalid("it is malformed")
	}
	switch u.Scheme {
	case "file":
		if u.Host != "" || len(parameters) > 0 || !path.IsAbs(u.Path) || path.Clean(u.Path) == "/" {
			return target{}, invalid("it must have an absolute path, no host and no parameters")
		}
		return target{directory: u.Path}, nil
	case "s3":
		if to.s3, err = s3Config(u, parameters); err != nil {
			return target{}, invalid("%v", err)
		}
		return to, nil
	default:
		return target{}, invalid("its scheme is not supported")
	}
}

func s3Config(u *url.URL, parameters url.Values) (s3.Config, error) {
	cfg := s3.Config{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/"), Retry: blob.DefaultRetry()}
	if cfg.Bucket == "" || cfg.Prefix != "" && !blob.ValidKey(cfg.Prefix) {
		return cfg, errors.New("it needs a bucket, and its prefix may only have A-Z a-z 0-9 . _ - = in components that " +
			"begin with a letter or digit")
	}
	for name, values := range parameters {
		value := values[0]
		if len(values) > 1 || value == "" {
			return cfg, fmt.Errorf("%q must occur once, with a value", name)
		}
		var err error
		switch name {
		case "endpoint":
			cfg.Endpoint = value
			at, bad := url.Parse(value)
			if bad != nil || at.Host == "" || at.User != nil || at.Scheme != "http" && at.Scheme != "https" {
				err = errors.New("endpoint must be an http:// or https:// URL without credentials")
			}
		case "region":
			cfg.Region = value
		case "path_style":
			if cfg.PathStyle, err = strconv.ParseBool(value); err != nil {
				err = errors.New("path_style must be 1 or 0")
			}
		case "sse":
			cfg.SSE = value
			if !slices.Contains([]string{"AES256", "aws:kms", "aws:kms:dsse"}, value) {
				err = errors.New("sse must be AES256, aws:kms or aws:kms:dsse")
			}
		case "kms_key":
			cfg.KMSKey = value
		default:
			err = fmt.Errorf("there is no parameter %q", name)
		}
		if err != nil {
			return cfg, err
		}
	}
	if cfg.KMSKey != "" && !strings.HasPrefix(cfg.SSE, "aws:kms") {
		return cfg, errors.New("kms_key needs sse=aws:kms or sse=aws:kms:dsse")
	}
	return cfg, nil
}
