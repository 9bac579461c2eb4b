package api

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// enumOf returns the values that a string may have: the values of the enum tag, else of its type,
// nil for any.
func enumOf(t reflect.Type, tag reflect.StructTag) []string {
	if values, ok := tag.Lookup("enum"); ok {
		return strings.Split(values, ",")
	}
	switch reflect.Zero(t).Interface().(type) {
	case proto.Language:
		return texts(proto.Languages())
	case proto.Status:
		return texts(append(Statuses(), "blocked"))
	case proto.Mode:
		return texts(Modes())
	case proto.Class:
		return texts([]proto.Class{proto.ClassInteractive, proto.ClassBackground})
	case proto.Stream:
		return texts([]proto.Stream{proto.Stdout, proto.Stderr})
	case proto.Scope:
		return texts(proto.Scopes())
	case AuditStage:
		return texts([]AuditStage{AuditIntent, AuditOutcome})
	case proto.Role:
		return texts(proto.Roles())
	case Reason:
		return texts([]Reason{
			ReasonScope, ReasonGlobal, ReasonPlan, ReasonSuspended, ReasonDeleted, ReasonAddress,
			ReasonProfile, ReasonImage, ReasonSession, ReasonNoWorker, ReasonMissing,
		})
	case proto.NetworkPolicy:
		return texts([]proto.NetworkPolicy{proto.NetworkBlocked, proto.NetworkUnrestricted, proto.NetworkAllowlist})
	case proto.DeliveryStatus:
		return texts([]proto.DeliveryStatus{proto.DeliveryPending, proto.DeliveryDelivered, proto.DeliveryFailed})
	case proto.OverlapPolicy:
		return texts([]proto.OverlapPolicy{proto.OverlapSkip, proto.OverlapQueue, proto.OverlapReplace})
	case proto.MissedPolicy:
		return texts([]proto.MissedPolicy{proto.MissedNone, proto.MissedLast, proto.MissedAll})
	case proto.RunOutcome:
		return texts([]proto.RunOutcome{proto.RunStarted, proto.RunSkipped, proto.RunMissed, proto.RunFailed})
	case proto.BatchStatus:
		return texts(proto.BatchStatuses())
	case proto.PipelineStatus:
		return texts([]proto.PipelineStatus{
			proto.PipelineRunning, proto.PipelineSuccess, proto.PipelineFailed,
			proto.PipelineCancelled,
		})
	case proto.StepStatus:
		return texts([]proto.StepStatus{
			proto.StepWaiting, proto.StepRunning, proto.StepSuccess, proto.StepFailed,
			proto.StepSkipped, proto.StepCancelled,
		})
	case proto.SandboxState:
		return texts(proto.SandboxStates())
	case proto.SandboxStop:
		return texts(proto.SandboxStops())
	case proto.SandboxReason:
		return texts(proto.SandboxReasons())
	case proto.SandboxActName:
		return texts(proto.SandboxActNames())
	case proto.ChangeKind:
		return texts(proto.AllChangeKinds())
	case ChangesType:
		return texts([]ChangesType{ChangesReady, ChangesChanges, ChangesKeepalive})
	case proto.UsageGroup:
		return texts(proto.UsageGroups())
	case proto.QuotaName:
		return texts(proto.QuotaNames())
	case proto.DeadReason:
		return texts([]proto.DeadReason{proto.DeadWorkersLost, proto.DeadMalformed})
	case Code:
		var codes []string
		for _, c := range Codes() {
			codes = append(codes, string(c.Code))
		}
		return codes
	case proto.MountKind:
		return texts([]proto.MountKind{proto.MountS3, proto.MountDirectory, proto.MountVolume})
	case proto.FileSource:
		return texts([]proto.FileSource{proto.SourceThread, proto.SourceVolume})
	default:
		return nil
	}
}

func texts[T ~string](values []T) []string {
	var list []string
	for _, v := range values {
		list = append(list, fmt.Sprint(v))
	}
	return list
}
