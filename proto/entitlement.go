package proto

// Entitlement is what an API key may do: the plan of its organisation, narrowed by the key.
type Entitlement struct {
	Plan

	KeyConcurrent int   // executions that may run at once with the key; 0 for no limit
	KeyTimeout    int   // seconds that an execution of the key may ask for; 0 for no limit
	Upgrade       *Plan // the plan that messages suggest; nil for none
}

// Caller is the client that asks for an execution.
type Caller struct {
	Key         *Key
	Entitlement Entitlement
	RequestID   string
	ClientID    string // as the client calls itself
	UserAgent   string
}
