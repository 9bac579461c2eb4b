package orgdata

import "context"

// KeptOutput returns how many messages of the output of executions a scan for an organisation has in memory.
func (d *Data) KeptOutput(ctx context.Context, org string) (n int, err error) {
	own, unknown, err := readOutput(ctx, d.scan(org))
	n = len(own)
	for _, list := range unknown {
		n += len(list)
	}
	return n, err
}
