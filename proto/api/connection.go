package api

import (
	"cmp"
	"net/http"

	"github.com/bullpen-run/bullpen/proto"
)

// ConnectionResource are the storage connections of organisations.
var ConnectionResource = register(Resource[Connection, ConnectionRequest, ConnectionRequest]{
	Name: "storage connection", Singular: "connection", Plural: "connections", Param: "slug", OfOrg: true,
	Settings: (*Connection).Request,

	CreateDoc:  connectionTested + connectionGlobal + " At most 100 for an organisation.",
	ReplaceDoc: "It applies to executions that are accepted from then on. " + connectionTested + connectionGlobal,
	RemoveDoc: "The storage stays as it is, but a volume is removed with all its versions. 409 while an API key that is " +
		"not revoked names the connection, and while an execution can change the volume. " + connectionGlobal,
}, func(r *Resource[Connection, ConnectionRequest, ConnectionRequest]) []Route {
	connection := Connection{
		Org: "acme", Slug: "data", Kind: proto.MountS3, Endpoint: "https://s3.example.com", Region: "us-east-1",
		Bucket: "acme-data", PathStyle: true, Credential: "DATA_KEY",
		Prefix: "shared", TestedAt: &Time{exampleTime()}, CreatedAt: Time{exampleTime()}, UpdatedAt: Time{exampleTime()},
	}
	wanted := connection.Request()
	wanted.Org = ""
	snapshot := Connection{
		Org: "acme", Slug: "work-may", Kind: proto.MountVolume, Bytes: 10 * proto.GiB, ReadOnly: true,
		CreatedAt: Time{exampleTime()}, UpdatedAt: Time{exampleTime()},
	}
	volume := Volume{
		Slug: "work", Quota: 10 * proto.GiB, Version: 1, Bytes: 2048, Files: 3, UsedAt: Time{exampleTime()},
		Versions: []ThreadVersion{{1, Time{exampleTime()}, new(proto.TraceID(exampleTrace)), 2048, 3}},
	}
	page := Connections{Connections: []Connection{connection}}
	routes := r.routes(connection, wanted, wanted, page, "The connections by organisation and slug.")
	ofOrg := query("org", "The organisation. By default that of the API key.", text())
	test := query("test", "false stores a bucket that only workers can reach: it is not tested.",
		object{"type": "boolean", "default": true})
	for i := range routes {
		switch i {
		case routeCreate, routeReplace:
			routes[i].Params = []Param{ofOrg, test}
		case routeGet, routeRemove:
			routes[i].Params = []Param{ofOrg}
		}
	}
	return append(routes, Route{
		Method: http.MethodPost, Path: "/v1/admin/connections/{slug}/test", ID: "testConnection", Tag: tagAdmin,
		Scope: proto.ScopeAdmin, Audit: "connection.test", Summary: "Test a storage connection",
		PathDoc: routes[routeGet].PathDoc,
		Params:  []Param{ofOrg},
		Doc: "As when it is created. 409 with the step that failed, for a directory, which only workers see, and " +
			"for a volume.",
		Responses: ok("The connection, with the time of this test.", connection),
		Errors:    []int{http.StatusNotFound, http.StatusConflict},
	}, Route{
		Method: http.MethodGet, Path: "/v1/admin/connections/{slug}/volume", ID: "getVolume", Tag: tagAdmin,
		Scope: proto.ScopeAdmin, Summary: "Look at what is stored of a volume",
		PathDoc: routes[routeGet].PathDoc, Params: []Param{ofOrg},
		Doc:       "409 for a connection of another kind.",
		Responses: ok("The volume.", volume), Errors: []int{http.StatusNotFound, http.StatusConflict},
	}, Route{
		Method: http.MethodPost, Path: "/v1/admin/connections/{slug}/fork", ID: "forkVolume", Tag: tagAdmin,
		Scope: proto.ScopeAdmin, Audit: "connection.fork", Summary: "Create a volume with the files of another",
		PathDoc: routes[routeGet].PathDoc, Params: []Param{ofOrg},
		Doc: "Nothing is copied, also while an execution changes the volume: the fork has its newest version, or one that " +
			"is named. Later changes of one are not in the other. " +
			"With read_only, it is a snapshot. 409 if there is a connection of the new slug, and for a connection of " +
			"another kind.",
		Request: ForkVolumeRequest{Slug: "work-may", ReadOnly: true}, Responses: created("The new connection.", snapshot),
		Errors: []int{http.StatusNotFound, http.StatusConflict}, Tagged: true,
	}, Route{
		Method: http.MethodGet, Path: "/v1/admin/connections/{slug}/archive", ID: "archiveVolume", Tag: tagAdmin,
		Scope: proto.ScopeAdmin, Summary: "Get a volume or a directory of it as a tar", PathDoc: routes[routeGet].PathDoc,
		Doc: "409 for a connection of another kind.",
		Params: []Param{
			ofOrg, query("version", "The number of a version; the newest without it.",
				object{"type": "integer", "minimum": 1, "maximum": MaxWhole}),
			archivePath("The directory to get, below the prefix of the connection; everything without it. Names in the tar " +
				"are relative to it."),
		},
		Responses: []Response{{
			Status: http.StatusOK, Doc: "The archive. An answer that breaks off is incomplete.",
			Text:    map[string]string{"application/x-tar": ""},
			Headers: map[string]string{"Content-Disposition": "attachment, with a file name."},
		}},
		Errors: []int{http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests},
	})
})

// What the documentation says of several routes of connections.
const (
	connectionTested = "The gateway tests a bucket first: it lists objects and, unless the connection is read-only, " +
		"writes a small object, reads it back and deletes it. If that fails, nothing is stored and the answer is 409 with " +
		"the step that failed. "
	connectionGlobal = "Only a global administrator names a directory."
)

// ConnectionRequest is a storage connection to store.
type ConnectionRequest struct {
	Org         string          `json:"org,omitempty" doc:"The organisation, as the parameter org of the query."`
	Slug        string          `json:"slug,omitempty" pattern:"^[a-z0-9][a-z0-9_-]{0,62}$" doc:"Programs see the connection at /data/{slug}. It may be omitted if it is in the path."`
	Kind        proto.MountKind `json:"kind" doc:"s3: a bucket of an S3-compatible server. directory: a directory of the workers, which only a global administrator can configure. volume: a volume that bullpen manages in its own blob store."`
	Endpoint    string          `json:"endpoint,omitempty" maxLength:"2048" doc:"URL of a bucket's server, such as https://s3.example.com; empty for Amazon S3. It must be public and https, unless the operator allows others."`
	Region      string          `json:"region,omitempty" pattern:"^[a-z0-9][a-z0-9-]{0,62}$" doc:"Region of a bucket, which it must have. Most servers other than Amazon's accept us-east-1."`
	Bucket      string          `json:"bucket,omitempty" pattern:"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$" doc:"Name of a bucket."`
	PathStyle   bool            `json:"path_style,omitempty" default:"false" doc:"The bucket is in the path of URLs instead of the host name. Most servers other than Amazon's need it."`
	Credential  string          `json:"credential,omitempty" doc:"Name of a secret of the organisation whose value is the JSON {\"access_key_id\",\"secret_access_key\",\"session_token\"}, the last one optional. Programs never get it."`
	Directory   string          `json:"directory,omitempty" maxLength:"1024" doc:"Absolute path of a directory, in one of the workers' --mount-roots."`
	Bytes       proto.Bytes     `json:"bytes,omitempty" minimum:"1MiB" maximum:"1000GiB" doc:"Quota for the content of a volume's files, required for volumes: at least 1MiB; the operator sets the maximum, 10GiB by default. A volume may have one file or directory per 16 KiB of quota, but at least 65,536 and at most 16,777,216."`
	Prefix      string          `json:"prefix,omitempty" maxLength:"256" doc:"The part of the storage that programs see: a relative path such as shared/data. Empty for everything."`
	ReadOnly    bool            `json:"read_only,omitempty" default:"false" doc:"Programs cannot change anything."`
	Description string          `json:"description,omitempty" maxLength:"256" doc:"For people."`
}

// DecodeConnection decodes and checks a connection of an organisation from the body of a request.
// slug is that in the path, empty for none. Its errors are [*proto.FieldError].
func DecodeConnection(org, slug string, body []byte) (proto.Connection, error) {
	r, err := Decode[ConnectionRequest](body)
	if err != nil {
		return proto.Connection{}, err
	}
	switch {
	case slug != "" && r.Slug != "" && r.Slug != slug:
		return proto.Connection{}, proto.FieldErrorf("slug", "must be %s as in the path, or absent", slug)
	case org != "" && r.Org != "" && r.Org != org:
		return proto.Connection{}, proto.FieldErrorf("org", "must be %s as in the query, or absent", org)
	}
	r.Slug, r.Org = cmp.Or(slug, r.Slug), cmp.Or(org, r.Org)
	c := r.Connection()
	return c, c.Check()
}

// Connection returns the connection to store, without its times.
func (r *ConnectionRequest) Connection() proto.Connection {
	c := proto.Connection{
		Org: r.Org, Slug: r.Slug, Kind: r.Kind, Directory: r.Directory, Bytes: int64(r.Bytes), Prefix: r.Prefix,
		ReadOnly: r.ReadOnly, Description: r.Description,
	}
	s3 := proto.S3Mount{
		Endpoint: r.Endpoint, Region: r.Region, Bucket: r.Bucket, PathStyle: r.PathStyle,
		Credential: r.Credential,
	}
	if s3 != (proto.S3Mount{}) {
		c.S3 = &s3
	}
	return c
}

// Connection is a storage connection.
type Connection struct {
	Org         string          `json:"org"`
	Slug        string          `json:"slug" doc:"Programs see it at /data/{slug}."`
	Kind        proto.MountKind `json:"kind"`
	Endpoint    string          `json:"endpoint,omitempty" doc:"URL of the server of a bucket; absent for Amazon's."`
	Region      string          `json:"region,omitempty"`
	Bucket      string          `json:"bucket,omitempty"`
	PathStyle   bool            `json:"path_style,omitempty" doc:"The bucket is in the path of URLs instead of the host name."`
	Credential  string          `json:"credential,omitempty" doc:"Name of the secret with the credentials."`
	Directory   string          `json:"directory,omitempty" doc:"Absolute path of a directory of the workers."`
	Bytes       proto.Bytes     `json:"bytes,omitempty" doc:"Quota of a volume."`
	Prefix      string          `json:"prefix,omitempty" doc:"The part of the storage that programs see; absent for everything."`
	ReadOnly    bool            `json:"read_only"`
	Snapshot    bool            `json:"snapshot,omitempty" doc:"A volume that stays read-only."`
	Description string          `json:"description,omitempty"`
	TestedAt    *Time           `json:"tested_at" doc:"When a gateway last tested the connection successfully; null if none has since more than its description was changed."`
	Removing    bool            `json:"removing,omitempty" doc:"The volume is being removed and can no longer be used. Removing it again completes the removal."`
	CreatedAt   Time            `json:"created_at"`
	UpdatedAt   Time            `json:"updated_at"`
}

// Connections is a list of storage connections.
type Connections struct {
	Connections []Connection `json:"connections"`
	NextCursor  *string      `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// NewConnection returns the form of a connection.
func NewConnection(c *proto.Connection) Connection {
	form := Connection{
		Org: c.Org, Slug: c.Slug, Kind: c.Kind, Directory: c.Directory, Bytes: proto.Bytes(c.Bytes), Prefix: c.Prefix,
		ReadOnly: c.ReadOnly, Description: c.Description,
		Snapshot: c.Snapshot, Removing: c.Removing, CreatedAt: Time{c.CreatedAt}, UpdatedAt: Time{c.UpdatedAt},
	}
	if c.S3 != nil {
		form.Endpoint, form.Region, form.Bucket, form.PathStyle, form.Credential = c.S3.Endpoint, c.S3.Region, c.S3.Bucket,
			c.S3.PathStyle, c.S3.Credential
	}
	if c.TestedAt != nil {
		form.TestedAt = &Time{*c.TestedAt}
	}
	return form
}

// Request returns what is sent to store the connection.
func (c *Connection) Request() ConnectionRequest {
	return ConnectionRequest{
		Org: c.Org, Slug: c.Slug, Kind: c.Kind, Endpoint: c.Endpoint, Region: c.Region, Bucket: c.Bucket,
		PathStyle: c.PathStyle, Credential: c.Credential,
		Directory: c.Directory, Bytes: c.Bytes, Prefix: c.Prefix, ReadOnly: c.ReadOnly, Description: c.Description,
	}
}
