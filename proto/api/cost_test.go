package api

import (
	"fmt"
	"maps"
	"reflect"
	"testing"

	"github.com/bullpen-run/bullpen/proto/api/apitest"
)

// Decoding a body costs no more than a few times what encoding/json needs to check that the same bytes
// are JSON, whatever they are. Each route with a JSON body is tested, but for those
// whose items are decoded one by one: their cost is bounded by the number of items.
func TestCostOfHostileBodies(t *testing.T) {
	size, long := 4<<20, 4<<20
	if testing.Short() {
		size, long = 32<<10, 1<<20
	}
	seen, seenFields := map[reflect.Type]bool{}, map[string]bool{}
	for _, route := range Routes() {
		request := reflect.TypeOf(route.Request)
		if request == nil || request.Kind() != reflect.Struct || route.Upload != "" || seen[request] {
			continue
		}
		seen[request] = true
		var names []string // of one field of each kind
		for _, f := range jsonFields(request) {
			like := fmt.Sprint(f.Type, f.Tag.Get("format"), f.Tag.Get("maxItems") != "", f.Tag.Get("maxProperties") != "")
			if !seenFields[like] {
				seenFields[like], names = true, append(names, f.name)
			}
		}
		bodies := apitest.HostileBodies(size, names...)
		if objectTag(request).Get("additionalProperties") == "true" { // unknown members are skipped, not refused
			maps.Copy(bodies, apitest.HostileBodies(long))
		}
		for kind, body := range bodies {
			apitest.CheckCost(t, route.ID+" with "+kind, body, func(raw []byte) {
				_ = decodeInto(reflect.New(request).Interface(), raw)
			})
		}
	}
	if len(seen) < 20 {
		t.Errorf("only %d kinds of bodies", len(seen))
	}
}
