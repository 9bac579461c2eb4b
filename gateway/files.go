package gateway

import (
	"slices"

	"github.com/bullpen-run/bullpen/gateway/files"
	"github.com/bullpen-run/bullpen/gateway/web"
)

// filesRoutes returns the routes of files and threads.
func (s *Server) filesRoutes() []web.Handler {
	threads := &files.ThreadRoutes{
		Opener: s.opener, Threads: s.Threads, Versions: s.Versions, Admin: s.ThreadAdmin, Quotas: s.Admission,
	}
	return slices.Concat(s.files.Handlers(), threads.Handlers())
}
