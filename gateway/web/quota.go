package web

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/bullpen-run/bullpen/proto/api"
)

// headerQuota is on answers to organisations above a soft limit of their month.
const headerQuota = "X-Quota-Warning"

// warnQuota adds a header to answers while the API key's organisation exceeds a soft monthly limit.
func (c *Core) warnQuota(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i := infoOf(r.Context())
		var warnings []string
		for _, use := range c.Entitlements.QuotaUses(r.Context(), i.Key.Org, i.Plan.Monthly) {
			if !use.Reached(use.Soft) {
				continue
			}
			text := fmt.Sprintf("%s;used=%s;soft=%d", use.Name, api.Quantity(use.Used), use.Soft)
			if use.Hard > 0 {
				text += fmt.Sprintf(";hard=%d", use.Hard)
			}
			warnings = append(warnings, fmt.Sprintf("%s;ends=@%d", text, use.Ends.Unix()))
		}
		if len(warnings) > 0 {
			w.Header().Set(headerQuota, strings.Join(warnings, ", "))
		}
		next.ServeHTTP(w, r)
	})
}
