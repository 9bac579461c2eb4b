package gateway

import (
	"context"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// storedPrincipal is like principal, but reads the store, where a key may be revoked.
func (s *Server) storedPrincipal(ctx context.Context, id string) (proto.Key, error) {
	if !strings.HasPrefix(id, proto.MemberPrefix) {
		return s.KeyAdmin.Get(ctx, id)
	}
	m, err := s.Members.Get(ctx, id)
	return m.Key(), err
}
