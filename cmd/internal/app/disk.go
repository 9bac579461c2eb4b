package app

import (
	"fmt"
	"syscall"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// minDiskReserve is the free disk space in bytes below which no more jobs are accepted. The
	// records and results of accepted ones need some, and the embedded NATS stops without any.
	minDiskReserve = 64 << 20
	// The default reserve is this part of the disk, but at most maxDiskReserve bytes.
	diskReserveDivisor = 20
	maxDiskReserve     = 2 << 30
)

// dataDisk is the disk of a data directory.
type dataDisk struct {
	dir     string
	reserve int64 // bytes; 0 for the default
}

// space returns the free bytes on the disk, and the reserve.
func (d *dataDisk) space() (free, reserve int64, err error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(d.dir, &st); err != nil {
		return 0, 0, fmt.Errorf("find the free space of %s: %w", d.dir, err)
	}
	reserve = d.reserve
	if reserve == 0 {
		reserve = max(minDiskReserve, min(int64(st.Blocks)*st.Bsize/diskReserveDivisor, maxDiskReserve))
	}
	return int64(st.Bavail) * st.Bsize, reserve, nil
}

// full returns why the disk must not store more, or "". A nil disk has room.
func (d *dataDisk) full() string {
	if d == nil {
		return ""
	}
	free, reserve, err := d.space()
	switch {
	case err != nil:
		return err.Error()
	case free < reserve:
		return fmt.Sprintf("the disk of the data directory has %d MiB free and --disk-reserve is %d MiB: make room there",
			free>>20, reserve>>20)
	}
	return ""
}

// report returns the space of the disk. It returns nil without a disk, and if the space is unknown.
func (d *dataDisk) report() *proto.DiskSpace {
	if d == nil {
		return nil
	}
	free, reserve, err := d.space()
	if err != nil {
		return nil // full reports it as a problem
	}
	return &proto.DiskSpace{Free: free, Reserve: reserve}
}

// dataDisk returns the disk of the data directory, nil if this process stores no growing data
// there.
func (c *Config) dataDisk() *dataDisk {
	if c.Embedded() || c.Has(RoleWorker) || c.Has(RoleGateway) && c.StoreURL == "" {
		return &dataDisk{dir: c.Data, reserve: int64(c.DiskReserve)}
	}
	return nil
}

// directories returns the directories in which this process stores much data, by their settings.
func (c *Config) directories() map[string]string {
	all := map[string]string{}
	if c.dataDisk() != nil {
		all["data"] = c.Data
	}
	if c.Has(RoleWorker) {
		all["image-dir"] = c.ImageDir
	}
	return all
}

func (s *system) dataDiskFull() bool { return s.disk.full() != "" }

// storeDiskFull reports whether the disk is full that the embedded NATS stores output on.
func (s *system) storeDiskFull() bool { return s.embedded != nil && s.dataDiskFull() }

// rejects returns why no jobs are accepted, nil if they are.
func (s *system) rejects() *proto.Rejection {
	if why := s.disk.full(); why != "" {
		return &proto.Rejection{Reason: proto.RejectedDiskFull, Detail: why}
	}
	if s.embedded != nil && s.embedded.Crowded() {
		return &proto.Rejection{
			Reason: proto.RejectedUnavailable,
			Detail: "the records of executions fill their share of memory; shorten --retention or raise --memory",
		}
	}
	return nil
}
