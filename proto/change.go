package proto

// ChangeKind is a kind of objects whose changes are reported. It has the name that the API uses.
type ChangeKind string

// The kinds of objects whose changes are reported.
const (
	ChangedExecutions    ChangeKind = "executions"
	ChangedBatches       ChangeKind = "batches"
	ChangedSchedules     ChangeKind = "schedules"
	ChangedPipelines     ChangeKind = "pipelines"
	ChangedSandboxes     ChangeKind = "sandboxes"
	ChangedAgentSessions ChangeKind = "agent_sessions"
	ChangedKeys          ChangeKind = "keys"
	ChangedMembers       ChangeKind = "members"
	ChangedSecrets       ChangeKind = "secrets"
	ChangedConnections   ChangeKind = "connections"
	ChangedOrgs          ChangeKind = "orgs"
	ChangedPlans         ChangeKind = "plans"
	ChangedProfiles      ChangeKind = "profiles"
)

// ChangeKinds returns the kinds of objects that a key with the scope read may list.
func ChangeKinds(k *Key) []ChangeKind {
	kinds := []ChangeKind{
		ChangedExecutions, ChangedBatches, ChangedSchedules, ChangedPipelines, ChangedSandboxes, ChangedAgentSessions,
	}
	if k.Has(ScopeAdmin) {
		kinds = append(kinds, ChangedKeys, ChangedMembers, ChangedSecrets, ChangedConnections, ChangedPlans,
			ChangedProfiles)
	}
	if k.GlobalAdmin() {
		kinds = append(kinds, ChangedOrgs)
	}
	return kinds
}

// AllChangeKinds returns all kinds of objects whose changes are reported.
func AllChangeKinds() []ChangeKind { return ChangeKinds(&Key{Scopes: Scopes(), Global: true}) }

// Change reports that an object was created, changed or removed.
type Change struct {
	Kind ChangeKind
	Org  string // empty for an object without an organisation, and for unknown objects
	ID   string // the id or name; empty for unknown objects
}
