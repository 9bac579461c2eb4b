package nsjail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

// netLimit is a setting of a jail's network namespace, below /proc/sys/net.
type netLimit struct{ name, value string }

// netLimits limit the uncharged memory of a program's sockets.
var netLimits = []netLimit{ // read only
	{"core/somaxconn", "16"}, // connections of one listener that the program has not accepted
	{"ipv4/tcp_max_syn_backlog", "128"},
	{"core/tstamp_allow_data", "0"}, // no copies of sent packets with their timestamps
	// Memory of a socket's options and control messages. The largest that programs send are 253
	// file descriptors, about 1 KiB.
	{"core/optmem_max", "4096"},
	// Receive buffer of a connection. The other end is on this host, so more would not make it
	// faster.
	{"ipv4/tcp_rmem", "4096 16384 262144"},
	// Send buffer of a connection. Each byte in it may keep a page.
	{"ipv4/tcp_wmem", "4096 16384 262144"},
}

func (l netLimit) path() string { return "/proc/sys/net/" + l.name }

func (l netLimit) set() error { return os.WriteFile(l.path(), []byte(l.value), 0) }

// tryNetLimits returns the limits that can be set in a new network namespace, and why the others
// cannot.
func tryNetLimits() (can []netLimit, err error) {
	err = egress.InNamespace(nil, func() error {
		var missing error
		for _, l := range netLimits {
			if err := l.set(); err != nil {
				missing = errors.Join(missing, err)
			} else {
				can = append(can, l)
			}
		}
		return missing
	})
	return can, err
}

// lackedNetLimits returns the error for limits that cannot be set because of cause.
func lackedNetLimits(cause error) error {
	return fmt.Errorf("programs can use memory of the host beyond their limit by connections, packets and options of "+
		"sockets: set the limits of a network namespace: %w; "+
		"the worker needs CAP_SYS_ADMIN, in a container a writable /proc/sys (docker: --security-opt "+
		"systempaths=unconfined), and a kernel that has the setting "+
		"for each namespace (Linux 6.18 has all)", cause)
}

// limitNetwork sets the limits in the network namespace of a process. A jail's namespace belongs to
// a user namespace of its
// own, and kernels such as Linux 6.1 have fewer settings there. The first jail shows which ones;
// later jails skip the others.
func (m *Maker) limitNetwork(pid int) error {
	m.netMu.Lock()
	limits := m.netLimits
	m.netMu.Unlock()
	if len(limits) == 0 {
		return nil
	}
	f, err := os.Open(procPath(pid, "ns/net"))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	var set []netLimit
	var absent error
	err = egress.InNamespace(f, func() error {
		for _, l := range limits {
			switch err := l.set(); {
			case errors.Is(err, fs.ErrNotExist):
				absent = errors.Join(absent, err)
			case err != nil:
				return err
			default:
				set = append(set, l)
			}
		}
		return nil
	})
	if err != nil || absent == nil {
		return err
	}
	m.netMu.Lock()
	defer m.netMu.Unlock()
	if len(set) < len(m.netLimits) { // otherwise another jail was first
		m.netLimits = set
		m.lackNetLimits(absent)
	}
	return nil
}

// lackNetLimits records and logs why limits are not set.
func (m *Maker) lackNetLimits(cause error) {
	m.noNetLimits = errors.Join(m.noNetLimits, cause)
	m.cfg.Log.Warn("network limits of jails not set", "error", lackedNetLimits(cause))
}

// NetLimits returns why not all limits of network namespaces are set in jails, or nil if all are.
// The error names the remedy. It is complete once there has been a jail.
func (m *Maker) NetLimits() error {
	m.netMu.Lock()
	defer m.netMu.Unlock()
	if m.noNetLimits == nil {
		return nil
	}
	return lackedNetLimits(m.noNetLimits)
}

// fragments is a setting of the host. With 1, the kernel copies data sent by programs into single
// pages. With 0, it copies it into fragments of 32 KiB. A queued byte keeps its whole fragment,
// which is uncharged.
var fragments = netLimit{"core/high_order_alloc_disable", "1"} // read only

// limitFragments changes the setting, and returns why that is impossible. Only the network namespace
// of the host has the setting.
func limitFragments() error {
	now, err := os.ReadFile(fragments.path())
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(now)) == fragments.value {
		return nil
	}
	return fragments.set()
}

// Fragments returns why the memory kept by a queued byte is not limited, or nil if it is. The error
// names the remedy.
func (m *Maker) Fragments() error {
	if m.noFragments == nil {
		return nil
	}
	return fmt.Errorf("a byte that waits in a queue may keep 32 KiB of the host's memory: %w; run `sysctl -w "+
		"net.core.high_order_alloc_disable=1` on the host, "+
		"and put the setting into /etc/sysctl.d; a container with a network of its own can neither make nor see it",
		m.noFragments)
}
