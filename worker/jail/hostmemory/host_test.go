package hostmemory

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	const meminfo = `MemTotal:       4000 kB
MemFree:        1200 kB
MemAvailable:   2400 kB
AnonPages:       360 kB
Balloon:          40 kB
HugePages_Total:   0
Hugetlb:          80 kB
`
	const zoneinfo = `Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 80
      nr_active_anon 10
      nr_inactive_file 90
      nr_active_file 20
      nr_unevictable 5
      nr_slab_reclaimable 50
      nr_slab_unreclaimable 100
      nr_isolated_anon 1
      nr_isolated_file 2
      nr_anon_pages 60
  pages free     100
        managed  400
      nr_free_pages 100
      nr_zone_inactive_anon 80
      nr_zspages   2
  pagesets
    cpu: 0
              count:    3
              high:     14
    cpu: 1
              count:    4
Node 0, zone   Normal
  pages free     200
        managed  600
      nr_free_pages 200
`
	const sockstat = `sockets: used 284
TCP: inuse 3 orphan 1 tw 19 alloc 150 mem 5
UDP: inuse 1 mem 2
UDPLITE: inuse 0
FRAG: inuse 0 memory 0
`
	got, err := parse([]byte(meminfo), []byte(zoneinfo), []byte(sockstat), 4<<10)
	want := Host{
		Available: 2400 << 10,
		Kernel:    (1000 - 300 - 7 - 80 - 10 - 90 - 20 - 5 - 3 - 50 - 2 - 20 - 10 - 7) << 12,
		Sockets:   7 << 12,
	}
	if err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	for _, bad := range []string{"", "MemTotal: 1 kB\n", "MemTotal: x kB\nMemAvailable: 1 kB\n", meminfo} {
		if h, err := parse([]byte(bad), nil, nil, 4<<10); err == nil {
			t.Errorf("%q: %+v", bad, h)
		}
	}
}

func TestARCSize(t *testing.T) {
	const arcstats = `13 1 0x01 147 39984 4512345 987654321
name                            type data
hits                            4    1234
size                            4    56789
compressed_size                 4    1
`
	if n := arcSize([]byte(arcstats)); n != 56789 {
		t.Errorf("got %d", n)
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
	const udp = `   sl  local_address rem_address   st tx_queue rx_queue tr tm->when` +
		` retrnsmt   uid  timeout inode ref pointer drops
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
	r := openReader(t)
	for range 2 {
		if h, err := r.Read(); err != nil || h.Available <= 0 || h.Kernel <= 0 {
			t.Errorf("%+v, %v", h, err)
		}
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

// A file that is larger than the buffer is read whole, each time.
func TestReadAll(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	want := strings.Repeat("0123456789", 1000)
	if err := os.WriteFile(path, []byte(want), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	buffer := make([]byte, 16)
	for range 2 {
		if n, err := readAll(f, &buffer); err != nil || string(buffer[:n]) != want {
			t.Errorf("read %d bytes: %v", n, err)
		}
	}
}

func openReader(tb testing.TB) *Reader {
	tb.Helper()
	r, err := Open()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := r.Close(); err != nil {
			tb.Error(err)
		}
	})
	return r
}

func BenchmarkRead(b *testing.B) {
	r := openReader(b)
	for b.Loop() {
		if _, err := r.Read(); err != nil {
			b.Fatal(err)
		}
	}
}
