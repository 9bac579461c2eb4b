// Package storage opens what bullpen keeps bytes in, by URL. The stores themselves are in package blob and in a package for each technology.
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

const forms = "file:///directory or s3://bucket/prefix?endpoint=…&region=…&path_style=1&sse=…&kms_key=…"

// Open opens the blob store at a URL: file:///directory, which is made if need be, or s3://bucket/prefix with these parameters, all optional:
//
//   - endpoint: the URL of a server that is not Amazon's
//   - region: that of the bucket
//   - path_style: 1 where the bucket is in the path of URLs and not in the name of the host
//   - sse: the server's own encryption: AES256, aws:kms or aws:kms:dsse
//   - kms_key: the key for that
//
// Credentials are no part of it. If keyFile is not empty, all content is encrypted with the key in it, which age-keygen writes. Only mistakes
// in what is given are errors: whether a server answers is seen when it is asked.
func Open(ctx context.Context, location, keyFile string) (*blob.Store, error) {
	backend, err := open(ctx, location)
	if err != nil {
		return nil, err
	}
	store := &blob.Store{Backend: backend, Policy: blob.DefaultPolicy()}
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

// Check finds the mistakes in a URL that can be found without touching anything.
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

// place is what a URL says: a directory, or a place in S3.
type place struct {
	directory string
	s3        s3.Config
}

func parse(location string) (to place, err error) {
	u, err := url.Parse(location)
	if err != nil { // its text would repeat the URL, with a password perhaps
		return place{}, errors.New("the URL of the store cannot be read: use " + forms)
	}
	if u.User != nil {
		return place{}, errors.New("the URL of the store has credentials in it: leave them out, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY " +
			"or another source that the AWS tools know")
	}
	mistake := func(format string, args ...any) error {
		shown := url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path} // there may be a password among the parameters
		return fmt.Errorf("the URL of the store, %q: %s: use %s", shown.String(), fmt.Sprintf(format, args...), forms)
	}
	parameters, err := url.ParseQuery(u.RawQuery)
	if err != nil || u.Fragment != "" || u.Opaque != "" {
		return place{}, mistake("its form is wrong")
	}
	switch u.Scheme {
	case "file":
		if u.Host != "" || len(parameters) > 0 || !path.IsAbs(u.Path) || path.Clean(u.Path) == "/" {
			return place{}, mistake("it must have an absolute path, no host and no parameters")
		}
		return place{directory: u.Path}, nil
	case "s3":
		if to.s3, err = s3Config(u, parameters); err != nil {
			return place{}, mistake("%v", err)
		}
		return to, nil
	default:
		return place{}, mistake("it is of no kind that bullpen knows")
	}
}

func s3Config(u *url.URL, parameters url.Values) (s3.Config, error) {
	cfg := s3.Config{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/"), Policy: blob.DefaultPolicy()}
	if cfg.Bucket == "" || cfg.Prefix != "" && !blob.ValidKey(cfg.Prefix) {
		return cfg, errors.New("a bucket is needed, and a prefix, if any, of A-Z a-z 0-9 . _ - = in components that begin with a letter or digit")
	}
	for name, values := range parameters {
		value := values[0]
		if len(values) > 1 || value == "" {
			return cfg, fmt.Errorf("%q must be there once, with a value", name)
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
