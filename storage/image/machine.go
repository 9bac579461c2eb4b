package image

import (
	"debug/elf"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"github.com/bullpen-run/bullpen/proto"
)

// machineOffset is the position of the machine in the header of an ELF file.
const machineOffset = 18

// elfHeader keeps the first bytes that are written to it.
type elfHeader struct {
	kept [machineOffset + 2]byte
	n    int
}

func (h *elfHeader) Write(b []byte) (int, error) {
	h.n += copy(h.kept[h.n:], b)
	return len(b), nil
}

// machine returns the machine of an ELF file, or EM_NONE for other content.
func (h *elfHeader) machine() elf.Machine {
	if string(h.kept[:len(elf.ELFMAG)]) != elf.ELFMAG {
		return elf.EM_NONE
	}
	var order binary.ByteOrder = binary.LittleEndian
	if elf.Data(h.kept[elf.EI_DATA]) == elf.ELFDATA2MSB {
		order = binary.BigEndian
	}
	return elf.Machine(order.Uint16(h.kept[machineOffset:]))
}

// architecture returns the architecture of the interpreters, or "" if all are scripts.
func (t *Tree) architecture(interpreters map[proto.Language]string) (found string, err error) {
	for _, path := range slices.Sorted(maps.Values(interpreters)) {
		n, err := t.walk(t.root, path, true, false)
		if err != nil {
			return "", err
		}
		var arch string
		switch machine := n.file.machine; machine {
		case elf.EM_NONE:
			continue
		case elf.EM_X86_64:
			arch = "amd64"
		case elf.EM_AARCH64:
			arch = "arm64"
		default:
			return "", fmt.Errorf("%w: %s is for %s; workers are amd64 or arm64", ErrArchitecture, path, machine)
		}
		if found != "" && found != arch {
			return "", fmt.Errorf("%w: %s is for %s, another interpreter for %s", ErrArchitecture, path, arch, found)
		}
		found = arch
	}
	return found, nil
}
