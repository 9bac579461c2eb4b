package hostmemory

import (
	"net"
	"os"
	"testing"
)

func TestParse(t *testing.T) {
	const meminfo = `MemTotal:       1000 kB
MemFree:         300 kB
MemAvailable:    600 kB
Buffers:          10 kB
Cached:          100 kB
SwapCached:        0 kB
AnonPages:        90 kB
Slab:            150 kB
SReclaimable:     50 kB
SUnreclaim:      100 kB
KernelStack:      20 kB
PageTables:       30 kB
VmallocUsed:      40 kB
Percpu:            5 kB
HugePages_Total:   0
`
	const zoneinfo = `Node 0, zone      DMA
  pages free     3840
      nr_zspages   2
  pagesets
    cpu: 0
              count:    3
              high:     14
    cpu: 1
              count:    4
`
	got, err := parse([]byte(meminfo), []byte(zoneinfo), 4<<10)
	want := Host{Available: 600 << 10, Kernel: (1000 - 300 - 10 - 100 - 90 - 50 - 9*4) << 10, Objects: (100 + 40 + 30 + 5) << 10}
	if err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	for _, bad := range []string{"", "MemTotal: 1 kB\n", "MemTotal: x kB\nMemAvailable: 1 kB\n"} {
		if h, err := parse([]byte(bad), nil, 4<<10); err == nil {
			t.Errorf("%q: %+v", bad, h)
		}
	}
}

// Linux 6.18 writes these tables.
func TestQueues(t *testing.T) {
	const netlink = `sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode
00000000215e950e 0   0          00000000 0        0        0     2        0        4
00000000ef387d00 4   77         00000000 8192     16       0     2        0        1429
`
	if n := netlinkQueues([]byte(netlink)); n != 8208 {
		t.Errorf("netlink: %d", n)
	}
	const udp = `   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  291: 0100007F:D431 00000000:0000 07 00000001:00034500 00:00000000 00000000     0        0 2043 2 0000000026bd1ef7 0
`
	if n := inetQueues([]byte(udp)); n != 0x34500 {
		t.Errorf("udp: %d", n)
	}
	if n := sum([]byte("UDP: inuse 1 mem 3\nFRAG: inuse 1 memory 4096\n"), "memory"); n != 4096 {
		t.Errorf("fragments: %d", n)
	}
}

func TestReal(t *testing.T) {
	h, err := Read()
	if err != nil || h.Available <= 0 || h.Kernel <= 0 || h.Objects <= 0 {
		t.Errorf("%+v, %v", h, err)
	}
	receiver, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = receiver.Close() }()
	if _, err := receiver.WriteTo(make([]byte, 60_000), receiver.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	if after, err := Queued(os.Getpid()); err != nil || after < 60_000 {
		t.Errorf("%d bytes wait: %v", after, err)
	}
}

func BenchmarkRead(b *testing.B) {
	for b.Loop() {
		if _, err := Read(); err != nil {
			b.Fatal(err)
		}
	}
}
