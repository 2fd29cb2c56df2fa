import sys; sys.path.insert(0,'benchmarks')
import torch,time
from step_time import stepper_of
from torch.profiler import profile, ProfilerActivity
d=torch.device('cuda')
for m in ('mdlm','vadd','emoe'):
    s=stepper_of(f'toy-8modes-{m}',d,{})
    for h in range(10): s(h)
    torch.cuda.synchronize(); a=time.perf_counter()
    for h in range(10,510): s(h)
    b=time.perf_counter(); torch.cuda.synchronize(); c=time.perf_counter()
    print(m,'host ms',(b-a)*2,'total ms',(c-a)*2)
    torch.cuda.synchronize(); a=time.perf_counter()
    for h in range(500): s.graph.replay()
    torch.cuda.synchronize(); print(m,'replay only ms',(time.perf_counter()-a)*2)
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for h in range(510,514): s(h)
        torch.cuda.synchronize()
    ev=p.key_averages(); tot=sum(e.self_device_time_total for e in ev); n=sum(e.count for e in ev)
    print(m,'kernels/step',n/4,'gpu us/step',tot/4)
    for e in sorted(ev,key=lambda e:-e.self_device_time_total)[:22]: print('   %8.1f us %5.1f x  %s'%(e.self_device_time_total/4,e.count/4,e.key[:110]))
