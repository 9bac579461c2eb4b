package proto

import (
	"errors"
	"fmt"
	"net/textproto"
	"slices"
	"strings"
)

// The limits of an injection.
const (
	MaxInjectionHosts    = 16
	MaxInjectionTemplate = 256 // bytes
	maxInjectionHeader   = 64  // bytes
)

// InjectionValue is the placeholder for the secret's value in a template.
const InjectionValue = "{{value}}"

// Injection makes a secret one that programs never get: the worker adds it as a header to their
// HTTP requests to some hosts.
type Injection struct {
	// Hosts are in the form of [ParseInjectionHost].
	Hosts  []string `json:"hosts" minItems:"1" maxItems:"16" must:"have 1 to 16 entries" doc:"The hosts to whose requests the header is added: example.com and *.example.com over HTTPS at port 443, example.com:8443 at others, http://example.com without encryption at port 80."`
	Header string   `json:"header" doc:"The added header, which replaces the program's own."`
	// Template contains InjectionValue once.
	Template string `json:"template" doc:"The value of the header, with {{value}} in the place of the secret."`
}

// InjectionHost is one entry of Injection.Hosts.
type InjectionHost struct {
	Plain       bool // HTTP without TLS
	NetworkRule      // a name, with ports
}

// ParseInjectionHost parses "example.com", "*.example.com", "example.com:8443,9443" and
// "http://example.com:8080". Without ports, the port is 443, or 80 after "http://".
func ParseInjectionHost(s string) (InjectionHost, error) {
	host, err := parseInjectionHost(s)
	if err != nil {
		return InjectionHost{}, fmt.Errorf("%q: %w", Shorten(s), err)
	}
	return host, nil
}

func parseInjectionHost(s string) (host InjectionHost, err error) {
	rest, plain := strings.CutPrefix(s, "http://")
	if strings.Contains(rest, "://") || plain && strings.Contains(rest, "/") {
		return host, errors.New("not a host: a name, with http:// before it if its requests are not encrypted, and " +
			"without a path")
	}
	rule, err := parseNetworkRule(rest)
	switch {
	case err != nil:
		return host, err
	case rule.Name == "":
		return host, errors.New("an address or a range; only names can get a secret, because a name is what a " +
			"certificate proves")
	case !strings.Contains(strings.TrimPrefix(rule.Name, "*."), "."):
		return host, errors.New("too much for one owner: a name needs two labels, after the wildcard too, as in " +
			"*.example.com")
	}
	if rule.Ports == nil {
		rule.Ports = []uint16{443}
		if plain {
			rule.Ports = []uint16{80}
		}
	}
	return InjectionHost{plain, rule}, nil
}

// refusedHeaders belong to a connection, or to how a message is read. [Injection] cannot set them.
var refusedHeaders = []string{ // read only
	"Accept-Encoding", "Connection", "Content-Encoding", "Content-Length", "Expect", "Host", "Keep-Alive",
	"Proxy-Authenticate",
	"Proxy-Authorization", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// Check checks an injection in a field. Its error is a [*FieldError].
func (i *Injection) Check(field string) error {
	if len(i.Hosts) == 0 || len(i.Hosts) > MaxInjectionHosts {
		return FieldErrorf(field+".hosts", "must have 1 to %d entries", MaxInjectionHosts)
	}
	for _, s := range i.Hosts {
		if _, err := ParseInjectionHost(s); err != nil {
			return FieldErrorf(field+".hosts", "%s", err)
		}
	}
	switch name := textproto.CanonicalMIMEHeaderKey(i.Header); {
	case i.Header == "" || len(i.Header) > maxInjectionHeader || strings.ContainsFunc(i.Header, notToken):
		return FieldErrorf(field+".header", "must be 1 to %d characters of A-Z, a-z, 0-9 and !#$%%&'*+-.^_`|~",
			maxInjectionHeader)
	case slices.Contains(refusedHeaders, name):
		return FieldErrorf(field+".header", "must not be %s, which belongs to the connection and not to the request", name)
	}
	switch {
	case len(i.Template) > MaxInjectionTemplate:
		return FieldErrorf(field+".template", "must be at most %d bytes", MaxInjectionTemplate)
	case strings.Count(i.Template, InjectionValue) != 1:
		return FieldErrorf(field+".template", "must contain %s once", InjectionValue)
	case strings.ContainsFunc(i.Template, isControl):
		return FieldErrorf(field+".template", "must have no control characters")
	}
	return nil
}

// CheckValue checks that a secret's value is a valid header value. Its error is a [*FieldError]
// that does not quote the value.
func (i *Injection) CheckValue(value string) error {
	if strings.ContainsFunc(value, isControl) {
		return FieldErrorf("value", "must have no control characters, such as line breaks, because it is added to a header")
	}
	return nil
}

// Fill returns the header's value.
func (i *Injection) Fill(value string) string {
	return strings.Replace(i.Template, InjectionValue, value, 1)
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }

// notToken reports whether a header's name cannot have r.
func notToken(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') &&
		!strings.ContainsRune("!#$%&'*+-.^_`|~", r)
}

// CheckInjections checks bindings of secrets that programs never get. Its error is a [*FieldError].
func CheckInjections(bound []SecretBinding, network NetworkPolicy) error {
	for _, b := range bound {
		switch {
		case b.Injection == nil:
		case b.Env != "":
			return FieldErrorf("secrets",
				"must not set the variable %s: programs never get the value of %s, which is added to their requests; "+
					"the administrator can bind it by its name alone", b.Env, b.Secret)
		case network == "" || network == NetworkBlocked:
			return FieldErrorf("secrets",
				"must not have %s in a sandbox whose network is blocked: it is added to requests to %s",
				b.Secret, strings.Join(b.Injection.Hosts, ", "))
		}
	}
	return nil
}

// HasInjections reports whether a binding is of a secret that programs never get.
func HasInjections(bound []SecretBinding) bool {
	return slices.ContainsFunc(bound, func(b SecretBinding) bool { return b.Injection != nil })
}

// Matches reports whether a rule covers a name in lower case without a final dot.
func (r *NetworkRule) Matches(name string) bool {
	if suffix, ok := strings.CutPrefix(r.Name, "*"); ok {
		return strings.HasSuffix(name, suffix) && len(name) > len(suffix)
	}
	return r.Name != "" && r.Name == name
}
