// Package manifest keeps a server's plans, organisations, sandbox profiles, storage connections and
// API keys in sync with a file.
package manifest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/rogpeppe/go-internal/diff"

	"github.com/bullpen-run/bullpen/client"
)

// Manifest lists objects. Unlisted objects are left alone.
type Manifest struct {
	Plans    []map[string]any `yaml:"plans,omitempty"`
	Orgs     []map[string]any `yaml:"orgs,omitempty"`
	Profiles []map[string]any `yaml:"profiles,omitempty"`
	// Connections are identified by their organisation and slug.
	Connections []map[string]any `yaml:"connections,omitempty"`
	Keys        []map[string]any `yaml:"keys,omitempty"` // identified by their organisation and name
}

// Read reads a manifest in YAML, in one document. Objects are checked by [Manifest.Compare].
func Read(text []byte) (*Manifest, error) {
	m := new(Manifest)
	decoder := yaml.NewDecoder(bytes.NewReader(text), yaml.DisallowUnknownField())
	if err := decoder.Decode(m); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if err := decoder.Decode(new(any)); !errors.Is(err, io.EOF) {
		return nil, errors.New("must be one YAML document")
	}
	return m, nil
}

// Change is a pending change of one object.
type Change struct {
	Kind string // plan, org, profile, connection or key
	Name string // for a key ORG/NAME, for a connection ORG/SLUG
	New  bool   // the object does not exist yet
	Diff string // from the present form in YAML to the wanted one
	// Apply makes the change, unless the object has changed since the comparison. It returns the
	// new key of a new API key.
	Apply func(context.Context) (key string, err error)
}

// kind is a kind of objects.
type kind struct {
	name string
	// decode returns the complete form of an object in the manifest, and its name.
	decode func(body []byte) (name string, wanted any, err error)
	// find returns the path of an object, or "".
	find func(name string) (path string, err error)
	// form returns the part of an object that a manifest describes.
	form func(stored []byte) (any, error)
	// settings returns the stored form that an object should have.
	settings func(present, wanted any) (any, error)
	path     string // of the list
}

// Compare returns the changes that bring a server in line with the manifest, in a valid order. It
// changes nothing. Errors name the object. Unless test is true, the server does not test the
// storage of changed connections.
func (m *Manifest) Compare(ctx context.Context, c *client.Client, test bool) ([]Change, error) {
	k, err := newKinds(ctx, c, test)
	if err != nil {
		return nil, err
	}
	var changes []Change
	for _, group := range []struct {
		kind    *kind
		objects []map[string]any
	}{
		{k.plans(), byNext(m.Plans)},
		{k.orgs(), m.Orgs},
		{k.profiles(), m.Profiles},
		{k.connections(), m.Connections},
		{k.keys(), m.Keys},
	} {
		seen := map[string]bool{}
		for i, object := range group.objects {
			change, err := group.kind.compare(ctx, c, object)
			if err != nil {
				return nil, fmt.Errorf("%s %d of the file: %w", group.kind.name, i+1, err)
			}
			if seen[change.Name] {
				return nil, fmt.Errorf("%s %s is in the file twice", group.kind.name, change.Name)
			}
			seen[change.Name] = true
			if change.Diff != "" {
				changes = append(changes, change)
			}
		}
	}
	return changes, nil
}

// byNext orders plans so that each comes after its next plan, which must exist first.
func byNext(plans []map[string]any) []map[string]any {
	next := map[any]any{}
	for _, p := range plans {
		next[p["name"]] = p["next"]
	}
	depth := func(p map[string]any) (n int) {
		for name := p["next"]; name != nil && n < len(plans); name = next[name] {
			n++
		}
		return n
	}
	return slices.SortedStableFunc(slices.Values(plans), func(a, b map[string]any) int { return depth(a) - depth(b) })
}

// compare returns the change of an object. Its Diff is empty if there is none.
func (k *kind) compare(ctx context.Context, c *client.Client, object map[string]any) (Change, error) {
	body, err := json.Marshal(object)
	if err != nil {
		return Change{}, err
	}
	name, wanted, err := k.decode(body)
	if err != nil {
		return Change{}, err
	}
	change := Change{Kind: k.name, Name: name}
	path, err := k.find(name)
	if err != nil {
		return change, err
	}
	var present any
	var tag string
	if path != "" {
		var stored json.RawMessage
		header, err := c.Do(ctx, http.MethodGet, path, nil, nil, &stored)
		var refused *client.Error
		switch {
		case errors.As(err, &refused) && refused.Status == http.StatusNotFound:
			path = ""
		case err != nil:
			return change, err
		default:
			tag = header.Get("ETag")
			if present, err = k.form(stored); err != nil {
				return change, err
			}
		}
	}
	if path == "" {
		change.New = true
		change.Apply = func(ctx context.Context) (string, error) {
			var made struct{ Key string }
			_, err := c.Do(ctx, http.MethodPost, k.path, nil, wanted, &made)
			return made.Key, err
		}
	} else {
		settings, err := k.settings(present, wanted)
		if err != nil {
			return change, err
		}
		change.Apply = func(ctx context.Context) (string, error) {
			_, err := c.Do(ctx, http.MethodPut, path, map[string]string{"If-Match": tag}, settings, nil)
			return "", err
		}
	}
	change.Diff, err = difference(k.name+" "+name, present, wanted)
	return change, err
}

// difference returns how the YAML of two forms differs, empty if it does not. present is nil for an
// object that does not exist.
func difference(name string, present, wanted any) (string, error) {
	var before []byte
	if present != nil {
		var err error
		if before, err = toYAML(present); err != nil {
			return "", err
		}
	}
	after, err := toYAML(wanted)
	if err != nil || bytes.Equal(before, after) {
		return "", err
	}
	text := string(diff.Diff(name, before, name, after))
	_, text, _ = strings.Cut(text, "\n") // the command that would show it
	return text, nil
}

// toYAML returns the YAML of an object's JSON.
func toYAML(object any) ([]byte, error) {
	text, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	return yaml.JSONToYAML(text)
}

// Export returns a manifest of all plans except unchanged built-in ones, organisations that are not
// being deleted, sandbox profiles except the default one, storage connections, and working API keys
// except the server's first one. It has no secrets of keys: a server does not know them.
func Export(ctx context.Context, c *client.Client) ([]byte, error) {
	k, err := newKinds(ctx, c, true)
	if err != nil {
		return nil, err
	}
	all, err := k.all(ctx)
	if err != nil {
		return nil, err
	}
	return toYAML(all)
}
