package web

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"

	"github.com/bullpen-run/bullpen/proto"
)

// SealCursor returns the cursor for the page of a list that starts at a place. filter selects the
// list and includes its organisation, but not the page.
func (c *Core) SealCursor(list string, filter any, place int64) (string, error) {
	return c.SealPlace(list, filter, string(binary.BigEndian.AppendUint64(nil, uint64(place))))
}

// OpenCursor returns the place in a cursor. A cursor of another list, filter or organisation is an
// error for the client.
func (c *Core) OpenCursor(list string, filter any, cursor string) (int64, error) {
	const placeSize = 8
	place, err := c.OpenPlace(list, filter, cursor)
	if err == nil && len(place) != placeSize {
		err = badPlace()
	}
	if err != nil {
		return 0, err
	}
	return int64(binary.BigEndian.Uint64([]byte(place))), nil
}

// SealPlace is SealCursor for any place. Cursors are encrypted: places may count the objects of all
// organisations.
func (c *Core) SealPlace(list string, filter any, place string) (string, error) {
	aead, scope, err := c.cursorCipher(list, filter)
	if err != nil {
		return "", err
	}
	nonce := make([]byte, aead.NonceSize())
	_, _ = rand.Read(nonce) // never an error
	return base64.RawURLEncoding.EncodeToString(aead.Seal(nonce, nonce, []byte(place), scope)), nil
}

// OpenPlace is OpenCursor for a place of SealPlace.
func (c *Core) OpenPlace(list string, filter any, cursor string) (string, error) {
	aead, scope, err := c.cursorCipher(list, filter)
	if err != nil {
		return "", err
	}
	raw, err := base64.RawURLEncoding.DecodeString(cursor)
	if err == nil && len(raw) >= aead.NonceSize() {
		if place, err := aead.Open(nil, raw[:aead.NonceSize()], raw[aead.NonceSize():], scope); err == nil {
			return string(place), nil
		}
	}
	return "", badPlace()
}

func badPlace() error {
	return proto.FieldErrorf("cursor", "must be the next_cursor of an answer to the same request")
}

// cursorCipher returns the cipher of cursors, and the additional data for a list's.
func (c *Core) cursorCipher(list string, filter any) (aead cipher.AEAD, scope []byte, err error) {
	block, err := aes.NewCipher(c.CursorSecret[:])
	if err == nil {
		aead, err = cipher.NewGCM(block)
	}
	if err == nil {
		scope, err = json.Marshal([]any{list, filter})
	}
	if err != nil {
		return nil, nil, fmt.Errorf("encrypt cursors of %s: %w", list, err)
	}
	return aead, scope, nil
}
