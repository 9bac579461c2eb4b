package guard

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// Limits of DNS names.
const (
	maxHostLen  = 253
	maxLabelLen = 63
)

// CheckURL checks the text of a URL without resolving its host. It returns a [*proto.FieldError]
// for field if the URL is not allowed.
func (g *Guard) CheckURL(field, s string) error {
	if err := proto.CheckWebhookURL(field, s); err != nil {
		return err
	}
	invalid := func(message string) error { return &proto.FieldError{Field: field, Message: field + " " + message} }
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return invalid("must be an absolute https URL with a host")
	case u.Scheme == "https":
	case u.Scheme != "http" || !g.config.AllowHTTP:
		return invalid("must be an https URL")
	}
	if message := g.checkHost(u.Hostname()); message != "" {
		return invalid(message)
	}
	// Only the shortest form of a port is allowed, so that an origin has one spelling.
	if port := u.Port(); port != "" || strings.HasSuffix(u.Host, ":") {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || strconv.FormatUint(n, 10) != port || !g.openPort(uint16(n)) {
			return invalid("must not name port " + port + ": " + g.openPorts() + " open to " + g.config.For)
		}
	}
	return nil
}

// checkHost returns what is wrong with the host of a URL, without brackets, or "".
func (g *Guard) checkHost(host string) string {
	const name = "must have the name of a host: letters, digits and hyphens between dots; of an international name the " +
		"form with xn--"
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
		if len(label) < 1 || len(label) > maxLabelLen ||
			strings.Trim(label, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") != "" {
			return name
		}
	}
	// Resolvers accept many spellings of IPv4 addresses: 127.1, 0x7f000001, 2130706433, 0177.0.0.1. In
	// all of them the last label is a number, which it never is in a name.
	last := strings.ToLower(labels[len(labels)-1])
	if strings.Trim(last, "0123456789") == "" || strings.HasPrefix(last, "0x") &&
		strings.Trim(last[2:], "0123456789abcdef") == "" {
		return "must name a host, not an address"
	}
	return ""
}

// Check checks the text of a URL and all addresses of its host. It returns a [*proto.FieldError]
// for field if the URL is not allowed. A host that does not resolve within a second is accepted,
// since its addresses are checked again when they are dialled.
func (g *Guard) Check(ctx context.Context, field, s string) error {
	if err := g.CheckURL(field, s); err != nil {
		return err
	}
	u, err := url.Parse(s)
	if err != nil {
		return &proto.FieldError{Field: field, Message: field + " must be an absolute https URL with a host"}
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	addrs, err := g.resolver.LookupNetIP(ctx, "ip", absolute(u.Hostname()))
	if err != nil {
		return nil
	}
	for _, addr := range addrs {
		if err := g.checkAddr(addr.Unmap()); err != nil {
			if _, refused := errors.AsType[*RefusedError](err); refused {
				return &proto.FieldError{
					Field: field, Message: field + " leads to an address that is not open to " + g.config.For + ": it is not public",
				}
			}
			return fmt.Errorf("check %s: %w", field, err)
		}
	}
	return nil
}
