package executions

import (
	"net/http"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// modeOf returns the mode that the client asks for. Async has precedence over the accepted types.
func modeOf(h http.Header) proto.Mode {
	if _, async := web.PreferenceOf(h, web.PreferAsync); async {
		return proto.ModeAsync
	}
	if web.Preferred(h, web.TypeJSON, web.TypeNDJSON, web.TypeSSE) != web.TypeJSON {
		return proto.ModeStreaming
	}
	return proto.ModeInline
}

// waitOf returns how long the client lets its execution wait for a worker, 0 if unspecified.
func waitOf(h http.Header) (time.Duration, error) {
	value, ok := web.PreferenceOf(h, web.PreferWait)
	if !ok {
		return 0, nil
	}
	seconds, err := strconv.Atoi(value)
	if err != nil || seconds < 1 || seconds > api.MaxQueueWait {
		return 0, api.Errorf(api.CodeValidation, "Prefer: wait must be a whole number of seconds from 1 to %d",
			api.MaxQueueWait)
	}
	return time.Duration(seconds) * time.Second, nil
}
