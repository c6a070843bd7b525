// The controllers of JobSet, Kubeflow's training operator and Kubeflow's MPI operator in one process, without their
// webhooks and leader elections: what they do with an object that is suspended is what tests compare ours with.
package main

import (
	"context"
	"log"

	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	mpioptions "github.com/kubeflow/mpi-operator/cmd/mpi-operator/app/options"
	mpiclient "github.com/kubeflow/mpi-operator/pkg/client/clientset/versioned"
	mpischeme "github.com/kubeflow/mpi-operator/pkg/client/clientset/versioned/scheme"
	mpiinformers "github.com/kubeflow/mpi-operator/pkg/client/informers/externalversions"
	mpi "github.com/kubeflow/mpi-operator/pkg/controller"
	kubeflow "github.com/kubeflow/training-operator/pkg/apis/kubeflow.org/v1"
	settings "github.com/kubeflow/training-operator/pkg/config"
	training "github.com/kubeflow/training-operator/pkg/controller.v1"
	"github.com/kubeflow/training-operator/pkg/controller.v1/common"
	jobset "sigs.k8s.io/jobset/api/jobset/v1alpha2"
	"sigs.k8s.io/jobset/pkg/controllers"
)

func main() {
	ctrl.SetLogger(klog.Background())
	ctx := ctrl.SetupSignalHandler()
	config := ctrl.GetConfigOrDie()
	config.QPS, config.Burst = 200, 200
	kinds := runtime.NewScheme()
	utilruntime.Must(scheme.AddToScheme(kinds))
	utilruntime.Must(jobset.AddToScheme(kinds))
	utilruntime.Must(kubeflow.AddToScheme(kinds))
	utilruntime.Must(mpischeme.AddToScheme(scheme.Scheme))
	manager, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:                 kinds,
		Metrics:                metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress: "0",
	})
	check(err)
	check(controllers.SetupJobSetIndexes(ctx, manager.GetFieldIndexer()))
	recorder := manager.GetEventRecorderFor("jobset")
	check(controllers.NewJobSetReconciler(manager.GetClient(), kinds, recorder).SetupWithManager(manager))
	settings.Config.PyTorchInitContainerImage = settings.PyTorchInitContainerImageDefault
	for kind, setUp := range training.SupportedSchemeReconciler {
		if kind != kubeflow.MPIJobKind { // which the MPI operator controls here
			check(setUp(manager, common.GenNonGangSchedulerSetupFunc(), 1))
		}
	}
	go func() { check(runMPI(ctx, config)) }()
	check(manager.Start(ctx))
}

func runMPI(ctx context.Context, config *rest.Config) error {
	core, jobs := kubernetes.NewForConfigOrDie(config), mpiclient.NewForConfigOrDie(config)
	factory := informers.NewSharedInformerFactory(core, 0)
	jobFactory := mpiinformers.NewSharedInformerFactory(jobs, 0)
	controller, err := mpi.NewMPIJobController(
		ctx, core, jobs, nil, nil,
		factory.Core().V1().ConfigMaps(),
		factory.Core().V1().Secrets(),
		factory.Core().V1().Services(),
		factory.Batch().V1().Jobs(),
		factory.Core().V1().Pods(),
		factory.Scheduling().V1().PriorityClasses(),
		jobFactory.Kubeflow().V2beta1().MPIJobs(),
		&mpioptions.ServerOption{ControllerRateLimit: 100, ControllerBurst: 1000},
	)
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	jobFactory.Start(ctx.Done())
	return controller.Run(1, ctx.Done())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
