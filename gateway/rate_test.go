package gateway

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

func TestRequestRateOfAKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.do("POST", "/v1/admin/plans", `{"name":"slow","request_rate":6}`).want(201, "")
		h.do("POST", "/v1/admin/orgs", `{"name":"beta","plan":"slow"}`).want(201, "")
		h.do("POST", "/v1/admin/keys", `{"name":"n","org":"beta","request_rate":7}`).want(400, "validation_error",
			"request_rate")
		key := func(settings string) *harness {
			return h.as(h.do("POST", "/v1/admin/keys", `{"name":"n","org":"beta"`+settings+`}`).want(
				201, "").json()["key"].(string))
		}
		whole, other, narrow := key(""), key(""), key(`,"request_rate":3`)
		for left := 5; left >= 0; left-- {
			a := whole.do("GET", "/v1/threads", "").want(200, "")
			if policy, got := a.header.Get("RateLimit-Policy"), a.header.Get("RateLimit"); policy != `"key";q=6;w=60` ||
				got != fmt.Sprintf(`"key";r=%d;t=0`, left) {
				t.Fatalf("%s, %s with %d left", policy, got, left)
			}
		}
		a := whole.do("GET", "/v1/threads", "").want(429, "rate_limited", "6 a minute")
		if a.header.Get("Retry-After") != "10" || a.header.Get("RateLimit") != `"key";r=0;t=10` ||
			a.json()["permanent"] != nil {
			t.Errorf("refused with %v %s", a.header, a.body)
		}
		other.do("GET", "/v1/threads", "").want(200, "")
		if a := h.do("GET", "/v1/threads", "").want(200, ""); a.header.Get("RateLimit") != "" {
			t.Errorf("without a limit: %v", a.header)
		}
		time.Sleep(10 * time.Second)
		whole.do("GET", "/v1/threads", "").want(200, "")
		whole.do("GET", "/v1/threads", "").want(429, "rate_limited")
		for range 3 {
			narrow.do("GET", "/v1/threads", "").want(200, "")
		}
		narrow.do("GET", "/v1/threads", "").want(429, "rate_limited", "3 a minute")
		h.do("PUT", "/v1/admin/plans/slow", `{"request_rate":60}`).want(200, "")
		whole.do("GET", "/v1/threads", "").want(429, "rate_limited", "60 a minute")
		time.Sleep(time.Second)
		whole.do("GET", "/v1/threads", "").want(200, "")
		time.Sleep(2 * time.Minute)
		whole.do("GET", "/v1/threads", "").want(200, "")
	})
}
