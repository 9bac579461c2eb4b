package scaler

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"

	"github.com/bullpen-run/bullpen/scheduler/autoscale"
	"github.com/bullpen-run/bullpen/scheduler/queue"
)

// maxPolicyFile bounds a file of policies, in bytes.
const maxPolicyFile = 1 << 20

// Policies are the policies of all pools.
type Policies struct {
	every autoscale.Policy
	pools map[string]autoscale.Policy
}

// DefaultPolicies returns the policies without a file.
func DefaultPolicies() *Policies { return &Policies{every: autoscale.DefaultPolicy()} }

// Of returns the policy of a pool.
func (p *Policies) Of(pool string) autoscale.Policy {
	if own, ok := p.pools[pool]; ok {
		return own
	}
	return p.every
}

// ReadPolicies reads a file with a policy in JSON. Its optional member "pools" has an object per
// pool with the fields that differ there.
func ReadPolicies(file string) (*Policies, error) {
	info, err := os.Stat(file)
	if err != nil {
		return nil, fmt.Errorf("read autoscaling policy: %w", err)
	}
	if info.Size() > maxPolicyFile {
		return nil, fmt.Errorf("read autoscaling policy %s: it has more than %d bytes", file, maxPolicyFile)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read autoscaling policy: %w", err)
	}
	p, err := parsePolicies(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return p, nil
}

func parsePolicies(text []byte) (*Policies, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil || fields == nil {
		_, err := autoscale.ParsePolicy(text)
		return nil, err // it names the mistake
	}
	var pools map[string]map[string]json.RawMessage
	if own, ok := fields["pools"]; ok {
		d := json.NewDecoder(bytes.NewReader(own))
		if err := d.Decode(&pools); err != nil {
			return nil, fmt.Errorf("autoscaling policy: pools must be an object of objects: %w", err)
		}
		delete(fields, "pools")
	}
	parse := func(own map[string]json.RawMessage) (autoscale.Policy, error) {
		all := maps.Clone(fields)
		maps.Copy(all, own)
		body, err := json.Marshal(all)
		if err != nil {
			return autoscale.Policy{}, fmt.Errorf("encode autoscaling policy: %w", err)
		}
		return autoscale.ParsePolicy(body)
	}
	every, err := parse(nil)
	if err != nil {
		return nil, err
	}
	p := &Policies{every: every, pools: map[string]autoscale.Policy{}}
	for name, own := range pools {
		if !queue.ValidPool(name) {
			return nil, fmt.Errorf("autoscaling policy: %q cannot be the name of a pool", name)
		}
		if p.pools[name], err = parse(own); err != nil {
			return nil, fmt.Errorf("pool %s: %w", name, err)
		}
	}
	return p, nil
}
