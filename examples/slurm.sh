#!/bin/bash
# A Ray cluster on the nodes of a Slurm job, a graph on it, and a trainer that uses it:
#
#   sbatch --nodes=4 --gpus-per-node=8 examples/slurm.sh graphs/math.yaml python my_trainer.py
#
# The trainer finds the cluster by Gym.attach(NAME) or Gym.from_graph(..., address="auto"). The job ends with it.
#SBATCH --job-name=gym-serve
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail

graph=$1
shift
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
port=${RAY_PORT:-6379}
started=()

# Other jobs share the network: whoever joins this cluster must know its token. srun passes it on.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(openssl rand -hex 32)}

end() {
  kill "${started[@]}" 2>/dev/null || true
  wait
}
trap end EXIT

address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --all-ip-addresses)
address=${address%% *}:$port

# Without a token, whoever reaches a port of Ray runs code as this user.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(openssl rand -hex 32)}
srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --block \
  --node-ip-address="${address%:*}" --port="$port" --dashboard-host=127.0.0.1 &
started+=($!)
until ray health-check --address "$address" 2>/dev/null; do
  kill -0 "${started[0]}" || { echo "the head did not start on $head" >&2; exit 1; }
  sleep 1
done

if ((${#nodes[@]} > 1)); then
  srun --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) --exclude="$head" \
    ray start --block --address="$address" &
  started+=($!)
fi

# The graph waits for the nodes that it needs: replicas are placed as these join.
export RAY_ADDRESS=$address
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap gym-serve up "$graph" --address "$address"
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap "$@"
