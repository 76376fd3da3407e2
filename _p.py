import sys; sys.path.insert(0,'tests')
import warnings, time
warnings.simplefilter("ignore")
from hypothesis import settings, Phase, HealthCheck
from hypothesis.stateful import run_state_machine_as_test
from stateful_none_life import LiveLife
t=time.time()
run_state_machine_as_test(LiveLife, settings=settings(max_examples=int(sys.argv[1]), stateful_step_count=25, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], report_multiple_bugs=False))
print("ok", time.time()-t)
