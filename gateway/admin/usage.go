package admin

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const typeCSV = "text/csv"

// Usage reports what organisations used.
type Usage interface {
	// Report returns the usage that a filter selects. It returns a [*proto.FieldError] if there are
	// more than [proto.MaxUsageRows] rows.
	Report(ctx context.Context, f *proto.UsageFilter) (proto.UsageReport, error)
}

// OrgQuotas knows how much of their monthly quotas organisations have used.
type OrgQuotas interface {
	// OrgQuotas returns how much of its plan's quotas an organisation has used. It returns none for
	// an unknown organisation, or if org is empty, which means all organisations.
	OrgQuotas(ctx context.Context, org string) ([]proto.QuotaUse, error)
}

// UsageRoutes are the routes of usage.
type UsageRoutes struct {
	*web.Core
	Usage  Usage
	Quotas OrgQuotas
}

// Handlers returns the handlers of the routes.
func (s *UsageRoutes) Handlers() []web.Handler {
	return []web.Handler{{ID: "getUsage", Handle: s.own}, {ID: "getOrgUsage", Handle: s.ofOrgs}}
}

// own shows the usage of the key's organisation.
func (s *UsageRoutes) own(w http.ResponseWriter, r *web.Request) error {
	f, err := usageFilter(r.URL.Query(), proto.UsageByDay, proto.UsageByKey, proto.UsageByLanguage)
	if err != nil {
		return err
	}
	f.Org = r.Key.Org
	return s.write(w, r, f)
}

// ofOrgs shows the usage of organisations.
func (s *UsageRoutes) ofOrgs(w http.ResponseWriter, r *web.Request) error {
	org, err := web.ListedOrg(r)
	if err != nil {
		return err
	}
	query := r.URL.Query()
	query.Del("org")
	f, err := usageFilter(query, proto.UsageGroups()...)
	if err != nil {
		return err
	}
	f.Org = org
	return s.write(w, r, f)
}

func (s *UsageRoutes) write(w http.ResponseWriter, r *web.Request, f *proto.UsageFilter) error {
	format := "json"
	if text := r.URL.Query().Get("format"); text != "" {
		if err := web.ParseOneOf(&format, "format", text, api.UsageFormats()); err != nil {
			return err
		}
	} else if web.Preferred(r.Header, web.TypeJSON, typeCSV) == typeCSV {
		format = "csv"
	}
	// A report may have many rows, so an organisation reads few at a time.
	done, err := s.Transfers.Begin(r.Context(), r.Key.Org)
	if err != nil {
		return err
	}
	defer done()
	report, err := s.Usage.Report(r.Context(), f)
	if err != nil {
		return fmt.Errorf("report usage: %w", err)
	}
	uses, err := s.Quotas.OrgQuotas(r.Context(), f.Org)
	if err != nil {
		return err
	}
	answer := api.NewUsage(f, &report, uses)
	if format == "json" {
		return web.WriteValue(w, http.StatusOK, answer)
	}
	var body bytes.Buffer
	if err := answer.WriteCSV(&body); err != nil {
		return fmt.Errorf("encode usage: %w", err)
	}
	w.Header().Set("Content-Type", typeCSV+"; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	_, err = body.WriteTo(w)
	return err
}

// usageFilter parses the parameters of a report but for the organisation.
func usageFilter(query url.Values, groups ...proto.UsageGroup) (*proto.UsageFilter, error) {
	for name := range query {
		if !slices.Contains([]string{"from", "to", "group_by", "format"}, name) {
			return nil, proto.FieldErrorf(proto.Shorten(name), "is no parameter of this report; see /docs")
		}
	}
	f := &proto.UsageFilter{To: time.Now().UTC().Truncate(24 * time.Hour), GroupBy: []proto.UsageGroup{}}
	if query.Has("to") {
		if err := day(&f.To, "to", query.Get("to")); err != nil {
			return nil, err
		}
	}
	f.From = f.To.AddDate(0, 0, 1-f.To.Day())
	if query.Has("from") {
		if err := day(&f.From, "from", query.Get("from")); err != nil {
			return nil, err
		}
	}
	switch days := int(f.To.Sub(f.From).Hours()/24) + 1; {
	case days < 1:
		return nil, proto.FieldErrorf("from", "must not be after to, which is %s", f.To.Format(proto.UsageDayLayout))
	case days > proto.MaxUsageDays:
		return nil, proto.FieldErrorf("from", "must be at most %d days before to, both included; these are %d",
			proto.MaxUsageDays, days)
	}
	by := "day"
	if query.Has("group_by") {
		by = query.Get("group_by")
	}
	for text := range strings.SplitSeq(by, ",") {
		if by == "" {
			break
		}
		g := proto.UsageGroup(text)
		if !slices.Contains(groups, g) || slices.Contains(f.GroupBy, g) {
			return nil, proto.FieldErrorf("group_by", "must be some of %v, each once, with commas between", groups)
		}
		f.GroupBy = append(f.GroupBy, g)
	}
	return f, nil
}

func day(to *time.Time, name, value string) (err error) {
	if *to, err = time.Parse(proto.UsageDayLayout, value); err != nil {
		return proto.FieldErrorf(name, "must be a day such as 2026-11-25")
	}
	return nil
}
