package guard

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// Limits of DNS names.
const (
	maxHostLen  = 253
	maxLabelLen = 63
)

// CheckForm checks what can be told of a URL by looking at it. What is wrong is a [*proto.FieldError] for that field.
func (g *Guard) CheckForm(field, s string) error {
	if err := proto.CheckWebhookURL(field, s); err != nil {
		return err
	}
	wrong := func(message string) error { return &proto.FieldError{Field: field, Message: field + " " + message} }
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return wrong("must be an absolute https URL with a host")
	case u.Scheme == "https":
	case u.Scheme != "http" || !g.config.AllowHTTP:
		return wrong("must be an https URL")
	}
	if message := g.checkHost(u.Hostname()); message != "" {
		return wrong(message)
	}
	// What is written is a number in its shortest form, so that a lane or a key made of it has no second name.
	if port := u.Port(); port != "" || strings.HasSuffix(u.Host, ":") {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || strconv.FormatUint(n, 10) != port || !slices.Contains(g.ports, uint16(n)) {
			return wrong("must not name port " + port + ": " + g.openPorts() + " open to webhooks")
		}
	}
	return nil
}

// checkHost gives what is wrong with the host of a URL, without brackets; empty for nothing.
func (g *Guard) checkHost(host string) string {
	const name = "must have the name of a host: letters, digits and hyphens between dots; of an international name the form with xn--"
	if addr, err := netip.ParseAddr(host); err == nil {
		if addr.Zone() == "" && !addr.Is4In6() && g.allowed(addr) {
			return ""
		}
		return "must name a host, not an address"
	}
	if len(host) > maxHostLen {
		return name
	}
	labels := strings.Split(host, ".")
	for _, label := range labels {
		if len(label) < 1 || len(label) > maxLabelLen || strings.Trim(label, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") != "" {
			return name
		}
	}
	// Resolvers take more spellings for IPv4 addresses than the common one: 127.1, 0x7f000001, 2130706433, 0177.0.0.1. Their last part is
	// a number, and that of a name never is.
	last := strings.ToLower(labels[len(labels)-1])
	if strings.Trim(last, "0123456789") == "" || strings.HasPrefix(last, "0x") && strings.Trim(last[2:], "0123456789abcdef") == "" {
		return "must name a host, not an address"
	}
	return ""
}

// Check checks the form of a URL and, where they are known within a second, the addresses of its host: all of them must be open. What is
// wrong is a [*proto.FieldError] for that field. A name that does not resolve in time is accepted: it may do so later, and what it leads
// to is judged then.
func (g *Guard) Check(ctx context.Context, field, s string) error {
	if err := g.CheckForm(field, s); err != nil {
		return err
	}
	u, err := url.Parse(s)
	if err != nil {
		return &proto.FieldError{Field: field, Message: field + " must be an absolute https URL with a host"}
	}
	ctx, cancel := context.WithTimeout(ctx, lookupWithin)
	defer cancel()
	addrs, err := g.resolver.LookupNetIP(ctx, "ip", absolute(u.Hostname()))
	if err != nil {
		return nil // it is judged when it is dialled
	}
	for _, addr := range addrs {
		if err := g.judge(addr.Unmap()); err != nil {
			if _, refused := errors.AsType[*RefusedError](err); refused {
				return &proto.FieldError{Field: field, Message: field + " leads to an address that is not open to webhooks: it is not public"}
			}
			return fmt.Errorf("check %s: %w", field, err)
		}
	}
	return nil
}
