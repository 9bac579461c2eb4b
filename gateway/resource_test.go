package gateway

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// Lists of what administrators manage have pages. A cursor is good for the same list alone.
func TestListsHavePages(t *testing.T) {
	h := newHarness(t)
	secrets := h.secrets
	for i := range 25 {
		name := fmt.Sprintf("n%02d", i)
		h.do("POST", "/v1/admin/orgs", `{"name":"`+name+`"}`).want(201, "")
		h.do("POST", "/v1/admin/plans", `{"name":"`+name+`"}`).want(201, "")
		h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme"}`).want(201, "")
		h.do("POST", "/v1/admin/members", `{"org":"acme","role":"viewer","email":"`+name+`@example.com"}`).want(201, "")
		h.do("POST", "/v1/admin/profiles", `{"name":"`+name+`"}`).want(201, "")
		connection := `{"org":"acme","slug":"` + name + `","kind":"directory","directory":"/srv/data"}`
		h.do("POST", "/v1/admin/connections", connection).want(201, "")
		secrets["acme/"+name] = proto.Secret{Org: "acme", Name: name}
	}
	lists := map[string]string{
		"orgs": "/v1/admin/orgs", "plans": "/v1/admin/plans", "keys": "/v1/admin/keys?org=acme",
		"members":  "/v1/admin/members?org=acme",
		"profiles": "/v1/admin/profiles", "connections": "/v1/admin/connections?org=acme",
		"secrets": "/v1/admin/secrets?org=acme",
	}
	cursors := map[string]string{}
	for field, path := range lists {
		with := func(query url.Values) string {
			return path + map[bool]string{true: "&", false: "?"}[strings.Contains(path, "?")] + query.Encode()
		}
		read := func(limit string) (entries []string) {
			query := url.Values{"limit": {limit}}
			for {
				answer := h.do("GET", with(query), "").want(200, "").json()
				for _, entry := range answer[field].([]any) {
					delete(entry.(map[string]any), "last_used_at") // changes between requests
					entries = append(entries, fmt.Sprint(entry))
				}
				if answer["next_cursor"] == nil {
					return entries
				}
				cursors[field] = answer["next_cursor"].(string)
				query.Set("cursor", cursors[field])
			}
		}
		whole, pages := read("100"), read("1")
		if len(whole) < 25 || !slices.Equal(whole, pages) {
			t.Errorf("%s: %d entries, and %d in pages of one", field, len(whole), len(pages))
		}
		h.do("GET", with(url.Values{"cursor": {"n03"}}), "").want(400, "validation_error", "cursor")
		h.do("GET", with(url.Values{"limit": {"101"}}), "").want(400, "validation_error", "limit")
	}
	h.do("GET", lists["members"]+"&cursor="+cursors["keys"], "").want(400, "validation_error", "cursor")
	h.do("GET", "/v1/admin/keys?org=other&cursor="+cursors["keys"], "").want(400, "validation_error", "cursor")
}
