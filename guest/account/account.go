// Package account knows the users of a sandbox: their names, and how to act with their rights.
package account

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// User is a user of the sandbox.
type User struct {
	Name string `json:"name"`
	UID  uint32 `json:"uid"`
	GID  uint32 `json:"gid"`
	Home string `json:"home"`
	// Capable means that the user's processes have the capabilities of this program.
	Capable bool `json:"capable"`
}

// Users are the users of the sandbox. Default is the name of the one that requests have which name
// none.
type Users struct {
	List    []User
	Default string
}

// UnknownError is returned for a name that no user has.
type UnknownError struct{ Name string }

func (e UnknownError) Error() string { return fmt.Sprintf("there is no user %q", e.Name) }

// Lookup returns the user with a name, or the default user if it is empty.
func (u *Users) Lookup(name string) (User, error) {
	if name == "" {
		name = u.Default
	}
	for _, user := range u.List {
		if user.Name == name {
			return user, nil
		}
	}
	return User{}, UnknownError{name}
}

// Of returns the user that a request names in its header Authorization, by the scheme Basic and with
// any password. Without that header it returns the default user.
func (u *Users) Of(h http.Header) (User, error) {
	authorization := h.Get("Authorization")
	scheme, encoded, _ := strings.Cut(authorization, " ")
	if !strings.EqualFold(scheme, "basic") {
		return u.Lookup("")
	}
	decoded, err := base64.StdEncoding.DecodeString(strings.TrimSpace(encoded))
	if err != nil {
		return User{}, UnknownError{encoded}
	}
	name, _, _ := strings.Cut(string(decoded), ":")
	return u.Lookup(name)
}

// UserName returns the name of the user with an id, or the id.
func (u *Users) UserName(uid uint32) string {
	for _, user := range u.List {
		if user.UID == uid {
			return user.Name
		}
	}
	return strconv.FormatUint(uint64(uid), 10)
}

// GroupName returns the name of the user whose group has an id, or the id. Groups are named like
// their users.
func (u *Users) GroupName(gid uint32) string {
	for _, user := range u.List {
		if user.GID == gid {
			return user.Name
		}
	}
	return strconv.FormatUint(uint64(gid), 10)
}

// Current reports whether the user has the ids that this program has.
func (u User) Current() bool {
	return int(u.UID) == os.Geteuid() && int(u.GID) == os.Getegid()
}

// setRights gives the calling thread the user's rights. The group comes first: with another user the
// thread no longer has the right to change it.
func (u User) setRights() error {
	const query = -1                       // no id: the call only returns the present one
	_, _ = unix.SetfsgidRetGid(int(u.GID)) // no error means anything
	_, _ = unix.SetfsuidRetUid(int(u.UID))
	gid, gidErr := unix.SetfsgidRetGid(query)
	uid, uidErr := unix.SetfsuidRetUid(query)
	if gidErr != nil || uidErr != nil || gid != int(u.GID) || uid != int(u.UID) {
		return fmt.Errorf("act as user %s (%d:%d): %w", u.Name, u.UID, u.GID, unix.EPERM)
	}
	return nil
}
