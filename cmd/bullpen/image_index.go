package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// indexTimeout bounds the request that checks a package index.
const indexTimeout = 10 * time.Second

// packageIndex is a server from which a build downloads packages.
type packageIndex struct {
	name    string // for people
	url     string
	proxy   string // a URL, or empty for that of the environment
	setting string // what changes the index
}

// check returns an error unless the server answers. Its certificate and the status of its answer are left
// to the tool that downloads: that has certificates and passwords of its own.
func (i packageIndex) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, indexTimeout)
	defer cancel()
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment}
	if proxy, err := url.Parse(i.proxy); err == nil && i.proxy != "" {
		transport.Proxy = http.ProxyURL(proxy)
	}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodHead, i.url, nil)
	if err == nil {
		var resp *http.Response
		if resp, err = transport.RoundTrip(req); err == nil {
			return resp.Body.Close()
		}
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return nil
	}
	return fmt.Errorf("%s, %s, cannot be reached: %w\n%s", i.name, i.url, err, i.setting)
}

// checkIndexes checks every index that the build downloads from, before the first download: the tools
// themselves try an unreachable one for minutes.
func (b *imageBuild) checkIndexes(ctx context.Context, python bool) error {
	b.steps.begin("checking the package indexes")
	group, ctx := errgroup.WithContext(ctx)
	for _, i := range debianIndexes(b.recipe.Suite, b.Mirror) {
		group.Go(func() error { return i.check(ctx) })
	}
	if python {
		group.Go(func() error {
			i, err := b.pipIndex(ctx)
			if err != nil {
				return err
			}
			return i.check(ctx)
		})
	}
	if b.tools["npm"] != "" {
		group.Go(func() error {
			i, err := b.npmIndex(ctx)
			if err != nil {
				return err
			}
			return i.check(ctx)
		})
	}
	return group.Wait()
}

// debianIndexes returns the mirrors that are URLs or lines of sources.list with one over HTTP. Others are
// files, or reached in ways that mmdebstrap alone knows.
func debianIndexes(suite string, mirrors []string) (all []packageIndex) {
	if len(mirrors) == 0 {
		mirrors = []string{"http://deb.debian.org/debian"}
	}
	for _, mirror := range mirrors {
		for word := range strings.FieldsSeq(mirror) {
			if strings.HasPrefix(word, "http://") || strings.HasPrefix(word, "https://") {
				all = append(all, packageIndex{
					name: "the mirror of Debian " + suite, url: word,
					setting: "--mirror names another one, http_proxy a proxy",
				})
			}
		}
	}
	return all
}

// pipIndex returns the index of pip's configuration, which it keeps.
func (b *imageBuild) pipIndex(ctx context.Context) (packageIndex, error) {
	i := packageIndex{
		name: "the index of Python packages", url: "https://pypi.org/simple/",
		setting: "PIP_INDEX_URL or `pip config set global.index-url URL` name another one, PIP_PROXY a proxy",
	}
	out, err := b.tool(ctx, "python3", b.dir, "-m", "pip", "config", "list")
	if err != nil {
		return i, err
	}
	b.pipConfig = string(out)
	// Lines such as global.index-url='https://…', later ones override earlier ones.
	for line := range strings.Lines(string(out)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		value = strings.Trim(value, "'")
		switch {
		case strings.HasSuffix(name, ".index-url"):
			i.url = value
		case strings.HasSuffix(name, ".proxy"):
			i.proxy = value
		}
	}
	return i, nil
}

// npmIndex returns the registry of npm's configuration.
func (b *imageBuild) npmIndex(ctx context.Context) (packageIndex, error) {
	i := packageIndex{
		name:    "npm's registry",
		setting: "npm_config_registry or `npm config set registry URL` name another one, npm_config_https_proxy a proxy",
	}
	out, err := b.tool(ctx, "npm", b.dir, "config", "get", "registry", "https-proxy")
	if err != nil {
		return i, err
	}
	for line := range strings.Lines(string(out)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch {
		case name == "registry":
			i.url = value
		case name == "https-proxy" && value != "null":
			i.proxy = value
		}
	}
	return i, nil
}
