// Package npm fetches packages from a registry of npm packages. It only downloads: it installs no
// dependencies and runs no scripts.
package npm

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// defaultRegistry is npm's own registry.
const defaultRegistry = "https://registry.npmjs.org/"

// maxDescription is the maximum size of a registry's description of a version, in bytes.
const maxDescription = 16 << 20

// Limits bound a package.
type Limits struct {
	Tarball int64 // bytes
	Content int64 // bytes of all files together
	Files   int
}

// Registry is a registry of npm packages.
type Registry struct {
	URL    string // empty for $npm_config_registry, which npm reads too, or else npm's own registry
	Limits Limits
}

// Package is a version of a package.
type Package struct {
	Name      string // such as typescript or @scope/name
	Version   string
	Integrity string // as in package-lock.json: sha512-BASE64
}

// url returns the URL of a path in the registry, and the same without a password for messages.
func (r *Registry) url(below string) (address, shown string, err error) {
	base := cmp.Or(r.URL, os.Getenv("npm_config_registry"), defaultRegistry)
	u, err := url.Parse(strings.TrimSuffix(base, "/") + below)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		// The error omits the URL, which may contain a password.
		return "", "", errors.New("the URL of the npm registry is not valid: write https://HOST/PATH")
	}
	return u.String(), u.Redacted(), nil
}

// get requests a path in the registry. The caller closes the body.
func (r *Registry) get(ctx context.Context, below string) (_ *http.Response, shown string, err error) {
	address, shown, err := r.url(below)
	if err != nil {
		return nil, "", err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, "", fmt.Errorf("GET %s: %w", shown, err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, "", err // it names the URL without the password
	}
	if answer.StatusCode != http.StatusOK {
		_ = answer.Body.Close()
		return nil, "", fmt.Errorf("GET %s: %s", shown, answer.Status)
	}
	return answer, shown, nil
}

// Integrity returns the integrity that the registry states for a version of a package.
func (r *Registry) Integrity(ctx context.Context, name, version string) (string, error) {
	answer, shown, err := r.get(ctx, "/"+url.PathEscape(name)+"/"+url.PathEscape(version))
	if err != nil {
		return "", err
	}
	defer func() { _ = answer.Body.Close() }() // it was only read
	var description struct {
		Dist struct {
			Integrity string `json:"integrity"`
		} `json:"dist"`
	}
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxDescription)).Decode(&description); err != nil {
		return "", fmt.Errorf("GET %s: decode the answer: %w", shown, err)
	}
	hashes := strings.Fields(description.Dist.Integrity)
	i := slices.IndexFunc(hashes, func(hash string) bool { return CheckIntegrity(hash) == nil })
	if i < 0 {
		return "", fmt.Errorf("GET %s: the registry states no SHA-512 of %s %s", shown, name, version)
	}
	return hashes[i], nil
}

// CheckIntegrity returns an error unless text is an integrity with SHA-512.
func CheckIntegrity(text string) error {
	encoded, ok := strings.CutPrefix(text, "sha512-")
	sum, err := base64.StdEncoding.DecodeString(encoded)
	if !ok || err != nil || len(sum) != sha512.Size {
		return fmt.Errorf("%.200q is not an integrity: write sha512-BASE64", text)
	}
	return nil
}

// Fetch downloads a package, compares it with its integrity, and only then unpacks its files into dir,
// which must exist and be empty. It leaves incomplete content there if it fails.
func (r *Registry) Fetch(ctx context.Context, p Package, dir string) error {
	answer, shown, err := r.get(ctx, fmt.Sprintf("/%s/-/%s-%s.tgz", p.Name, path.Base(p.Name), url.PathEscape(p.Version)))
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }() // it was only read
	tarball, err := os.CreateTemp(dir, ".tarball-")
	if err != nil {
		return err
	}
	defer func() { _ = tarball.Close() }() // it has no name any more
	if err := os.Remove(tarball.Name()); err != nil {
		return err
	}
	hash := sha512.New()
	n, err := io.Copy(io.MultiWriter(tarball, hash), io.LimitReader(answer.Body, r.Limits.Tarball+1))
	if err != nil {
		return fmt.Errorf("GET %s: %w", shown, err)
	}
	if n > r.Limits.Tarball {
		return fmt.Errorf("GET %s: the file is larger than the maximum of %d bytes", shown, r.Limits.Tarball)
	}
	if got := "sha512-" + base64.StdEncoding.EncodeToString(hash.Sum(nil)); got != p.Integrity {
		return fmt.Errorf("GET %s: the integrity of the file is %s, not %s", shown, got, p.Integrity)
	}
	if _, err := tarball.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if err := r.Limits.unpack(tarball, dir); err != nil {
		return fmt.Errorf("unpack %s: %w", shown, err)
	}
	return nil
}

// unpack writes the files of a package, which lie in one directory of the tarball. Everybody may read
// them, and nobody but their owner may change them.
func (l Limits) unpack(tarball io.Reader, dir string) error {
	unzipped, err := gzip.NewReader(tarball)
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // nothing is written through it
	files, left, n := tar.NewReader(unzipped), l.Content, 0
	for {
		header, err := files.Next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case header.Typeflag == tar.TypeXGlobalHeader || header.Typeflag == tar.TypeDir:
			continue
		case header.Typeflag != tar.TypeReg:
			return fmt.Errorf("%.200q is not a file: links and devices are not accepted", header.Name)
		}
		_, name, _ := strings.Cut(header.Name, "/")
		if name = filepath.FromSlash(name); !filepath.IsLocal(name) {
			return fmt.Errorf("the path %.200q is not in the package", header.Name)
		}
		if n++; n > l.Files {
			return fmt.Errorf("the package has more than %d files", l.Files)
		}
		if left -= header.Size; left < 0 {
			return fmt.Errorf("the package has more than %d bytes", l.Content)
		}
		mode := fs.FileMode(0o644)
		if header.Mode&0o111 != 0 {
			mode = 0o755
		}
		if err := write(root, name, mode, files); err != nil {
			return err
		}
	}
}

// write creates a file and its parent directories, with modes that do not depend on the umask.
func write(root *os.Root, name string, mode fs.FileMode, content io.Reader) (err error) {
	for i, c := range name {
		if c != filepath.Separator {
			continue
		}
		err := root.Mkdir(name[:i], 0o755)
		if err == nil {
			err = root.Chmod(name[:i], 0o755)
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	file, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if _, err := io.Copy(file, content); err != nil {
		return err
	}
	return file.Chmod(mode)
}
