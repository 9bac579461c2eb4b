package gateway

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func (s *Server) rotateSecretsKey(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := detached(r.Context())
	defer cancel()
	keys, err := s.SecretsKey.Rotate(ctx)
	if errors.Is(err, proto.ErrNoSecretsKey) {
		return api.Errorf(api.CodeConflict, "%s", err)
	}
	if err != nil {
		return fmt.Errorf("rotate the key of secrets: %w", err)
	}
	s.Log.InfoContext(ctx, "key of secrets rotated", "wrapped_for", keys, "key", infoOf(r.Context()).key.ID)
	return writeValue(w, http.StatusOK, api.RotatedKey{WrappedFor: keys})
}
