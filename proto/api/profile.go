package api

import (
	"maps"
	"net/http"
	"slices"

	"github.com/bullpen-run/bullpen/proto"
)

// ProfileResource are the sandbox profiles.
var ProfileResource = register(Resource[proto.Profile, proto.Profile, proto.Profile]{
	Name: "sandbox profile", Singular: "profile", Plural: "profiles", Param: "name", Settings: same[proto.Profile],
	CreateDoc: "Absent fields are taken from the profile named default; the answer is complete.",
	RemoveDoc: "Refused while an unrevoked API key is bound to it, or has it in profiles.",
}, func(r *Resource[proto.Profile, proto.Profile, proto.Profile]) []Route {
	usedProfiles := "The administrator of an organisation sees the profiles of its valid API keys, and the built-in ones."
	profile := proto.DefaultProfile()
	profile.Name, profile.CPU, profile.Memory, profile.Pids = "web", 2, 512*proto.MiB, 128
	profile.Network = proto.Network{Policy: proto.NetworkAllowlist, Allow: []string{"pypi.org:443"}}
	profile.Env = map[string]string{"STAGE": "test"}
	wanted, page := ProfileRequest{Profile: profile}, Profiles{Profiles: []proto.Profile{profile}}
	routes := r.routes(profile, wanted, wanted, page,
		"The profiles by name, after the built-in ones default and agents.")
	routes[routeList].Doc, routes[routeGet].Doc = usedProfiles, usedProfiles
	routes[routeGet].Errors = []int{http.StatusNotFound}
	routes[routeReplace].Doc = "As a whole: absent fields are as in the profile named default. It applies to executions " +
		"that are accepted from then on."
	preloadError := "python3 cannot be a zygote: its stderr: ModuleNotFoundError: No module named 'nump'"
	return append(changedByGlobal(routes), Route{
		Method: http.MethodGet, Path: "/v1/admin/profiles/{name}/preload", ID: "getProfilePreload", Tag: tagAdmin,
		Scope: proto.ScopeAdmin, Summary: "Look at the preloading of a profile", PathDoc: routes[routeGet].PathDoc,
		Doc: usedProfiles,
		Responses: ok("Whether a worker failed to import the modules.",
			ProfilePreload{Error: &preloadError, Worker: new("worker-1-8f3a2c"), At: &Time{exampleTime()}}),
		Errors: []int{http.StatusNotFound},
	})
})

// ProfileRequest is a sandbox profile to store.
type ProfileRequest struct {
	_ struct{} `partial:"true" doc:"null means absent."`

	proto.Profile
}

// Profiles is the list of all sandbox profiles.
type Profiles struct {
	Profiles   []proto.Profile `json:"profiles"`
	NextCursor *string         `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// ProfilePreload is the last failure to preload the modules of a profile.
type ProfilePreload struct {
	Error  *string `json:"error" doc:"Why a worker could not preload the modules in the last 24 hours; null if none failed. Programs then start without them."`
	Worker *string `json:"worker" doc:"The worker that failed last; null if none failed."`
	At     *Time   `json:"at" doc:"When it failed last."`
}

// DecodeProfile decodes and validates a sandbox profile. Absent members are as in defaults, but the
// default sizes of the home and of /tmp are at most a half and a quarter of the memory. If name is
// not empty, the body may omit the name and must not give another. Errors are [*proto.FieldError].
func DecodeProfile(name string, body []byte, defaults proto.Profile) (proto.Profile, error) {
	p := defaults
	p.Name, p.Disk.Home, p.Disk.Tmp = "", 0, 0
	p.Env, p.Network.Allow, p.Preload = maps.Clone(p.Env), slices.Clone(p.Network.Allow), slices.Clone(p.Preload)
	p.SystemCalls, p.Network.Private = slices.Clone(p.SystemCalls), slices.Clone(p.Network.Private)
	request := ProfileRequest{Profile: p}
	if err := decodeFields(&request, body); err != nil {
		return proto.Profile{}, err
	}
	p = request.Profile
	if p.Disk.Home == 0 {
		p.Disk.Home = min(defaults.Disk.Home, p.Memory/proto.DefaultHomeShare)
	}
	if p.Disk.Tmp == 0 {
		p.Disk.Tmp = min(defaults.Disk.Tmp, p.Memory/proto.DefaultTmpShare)
	}
	p.Network.Policy = p.Network.Effective()
	if err := nameInPath(&p.Name, name); err != nil {
		return proto.Profile{}, err
	}
	return p, p.Validate()
}
