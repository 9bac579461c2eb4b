package proto

import (
	"errors"
	"strings"
	"testing"
)

func TestImageWords(t *testing.T) {
	for name, ok := range map[string]bool{
		"py-3.14": true, "a": true, "0_x": true, strings.Repeat("a", 63): true,
		"": false, ".": false, "..": false, "-x": false, "Py": false, "a/b": false, "a b": false, "ä": false,
		strings.Repeat("a", 64): false, "a\n": false,
	} {
		if err := CheckImageName(name); (err == nil) != ok {
			t.Errorf("name %q: %v", name, err)
		}
	}
	for digest, ok := range map[string]bool{
		"sha256:" + strings.Repeat("0a", 32): true,
		"":                                   false, strings.Repeat("0a", 32): false,
		"sha256:" + strings.Repeat("0A", 32): false,
		"sha256:" + strings.Repeat("0", 63):  false, "sha256:" + strings.Repeat("0", 64) + "\n": false,
		"sha256:../" + strings.Repeat("0", 61): false,
	} {
		if ValidImageDigest(digest) != ok {
			t.Errorf("digest %q", digest)
		}
	}
	for _, name := range ImageEnv() {
		if strings.HasPrefix(name, "LD_") || strings.HasPrefix(name, "BASH") || strings.HasSuffix(name, "_OPTIONS") {
			t.Errorf("%s is taken over from images", name)
		}
	}
	i := Image{Languages: map[Language]string{Bash: "/bin/bash"}}
	if path, err := i.Interpreter(Bash); path != "/bin/bash" || err != nil {
		t.Error(path, err)
	}
	var field *FieldError
	if _, err := i.Interpreter(Node); !errors.As(err, &field) ||
		err.Error() != "language 'node' is not available in this sandbox image, which has bash" {
		t.Error(err)
	}
}
