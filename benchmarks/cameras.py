"""CPU time of eight cameras: the vision worker beside ultralytics' own stream loader, on the same streams.

Serves a drawn street in 720p H.264 over RTSP on loopback from a process of its own, lets each side look at it
for a while with the same detector, and prints JSON: frames that were detected in, CPU seconds of the side's
process, and CPU milliseconds a frame, in rounds that alternate. The worker's time includes tracking, triggers
and jobs. Both get the same `--model`; of a `.pt` the worker makes its own export where it can (`--runtime`).

Cameras send about 1 Mbit/s at this size and rate (`--mbit`). What the decoder takes, the same on both sides,
rises with it and hides the rest.

    python benchmarks/cameras.py --cameras 8 --fps 5 --seconds 30
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

START_S = 90.0
WARM_UP_S = 5.0
SECONDS_OF_VIDEO = 10


def serve(args: argparse.Namespace) -> None:
    from tests.vision.rtsp_server import RtspServer, encoded
    from vision.scenes import SceneStream

    stream = SceneStream("street", 7, float(args.camera_fps), (args.width, args.height))
    pictures = [stream.frame(index)[0] for index in range(SECONDS_OF_VIDEO * args.camera_fps)]
    video = encoded(fps=args.camera_fps, pictures=pictures, mbit_per_s=args.mbit)
    with RtspServer(video=video, fps=args.camera_fps) as server:
        print(server.url(), flush=True)
        sys.stdin.read()


def run_worker(args: argparse.Namespace) -> dict:
    from appliance.ingest import VisionWorker
    from appliance.settings import load_settings
    from queues import EmbeddedServer

    cameras = {f"cam{i}": {"source": args.url, "fps": args.fps} for i in range(args.cameras)}
    detector = {"device": "cpu", "imgsz": args.imgsz, "model": args.model, "runtime": args.runtime}
    with EmbeddedServer() as redis:
        worker = VisionWorker(load_settings(None, {"detector": detector, "cameras": cameras}), redis.url)
        stop = threading.Event()
        thread = threading.Thread(target=worker.run, args=(stop,))
        thread.start()
        try:
            counted = measured(args, lambda: sum(c.status({}).num_frames for c in worker._cameras.values()))
            return {"computed_by": worker._detector.runtime, **counted}
        finally:
            # why: the worker outlives a Redis that ends first, and writes a line a second about it.
            stop.set()
            thread.join()


def run_ultralytics(args: argparse.Namespace) -> dict:
    from vision.ultralytics_quiet import import_ultralytics

    num_frames = 0
    stop = threading.Event()

    def predict(streams: str) -> None:
        nonlocal num_frames
        model = import_ultralytics().YOLO(args.model, task="detect")
        stride = max(1, round(args.camera_fps / args.fps))
        for _ in model.predict(streams, stream=True, imgsz=args.imgsz, vid_stride=stride, verbose=False):
            num_frames += 1
            if stop.is_set():
                return

    with tempfile.NamedTemporaryFile("w", suffix=".streams") as file:
        file.write("\n".join([args.url] * args.cameras))
        file.flush()
        thread = threading.Thread(target=predict, args=(file.name,), daemon=True)
        thread.start()
        counted = measured(args, lambda: num_frames)
        stop.set()
        thread.join(10)
    return counted


def measured(args: argparse.Namespace, num_frames) -> dict:
    """Frames and CPU seconds of this process while `args.seconds` pass, once frames have come for a while."""
    deadline = time.monotonic() + START_S
    while num_frames() < args.cameras:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{num_frames()} frames of {args.cameras} cameras after {START_S:g} s")
        time.sleep(0.1)
    time.sleep(WARM_UP_S)
    frames, cpu_s, started_at = num_frames(), time.process_time(), time.monotonic()
    time.sleep(args.seconds)
    frames, cpu_s = num_frames() - frames, time.process_time() - cpu_s
    seconds = time.monotonic() - started_at
    return {
        "frames": frames,
        "frames_per_s": round(frames / seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "cpu_ms_per_frame": round(1e3 * cpu_s / max(1, frames), 2),
        "cpu_share": round(cpu_s / seconds, 3),
    }


SIDES = {"worker": run_worker, "ultralytics": run_ultralytics}


def compare(args: argparse.Namespace) -> dict:
    from appliance.bench.machine import environment

    here = [sys.executable, __file__, *sys.argv[1:]]
    rounds: dict[str, list[dict]] = {side: [] for side in SIDES}
    with subprocess.Popen(
        [*here, "--side", "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        url = server.stdout.readline().decode().strip()
        for side in [*SIDES] * args.rounds:
            done = subprocess.run([*here, "--side", side, "--url", url], check=True, stdout=subprocess.PIPE)
            rounds[side].append(json.loads(done.stdout.splitlines()[-1]))
        server.stdin.close()
    cost = {side: ms_per_frame(results) for side, results in rounds.items()}
    asked = {name: value for name, value in vars(args).items() if name not in ("side", "url")}
    asked["model"] = Path(args.model).name
    ratio = round(cost["worker"] / cost["ultralytics"], 3)
    return {
        "asked": asked,
        **rounds,
        "cpu_ms_per_frame": cost,
        "ratio_cpu_per_frame": ratio,
        "environment": environment(),
    }


def ms_per_frame(results: list[dict]) -> float:
    """Of all rounds together."""
    frames, cpu_s = (sum(result[key] for result in results) for key in ("frames", "cpu_s"))
    return round(1e3 * cpu_s / max(1, frames), 2)


def main() -> None:
    from appliance.settings import BUNDLED_DETECTOR

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cameras", type=int, default=8)
    parser.add_argument("--fps", type=float, default=5.0, help="frames a second that are looked at")
    parser.add_argument("--camera-fps", type=int, default=5, help="frames a second that cameras send")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument(
        "--mbit", type=float, default=1.0, help="Mbit/s of each camera; 0: what is encoded soonest (10)"
    )
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--model", default=str(BUNDLED_DETECTOR))
    parser.add_argument("--runtime", choices=["auto", "torch", "openvino"], default="auto")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--side", choices=["serve", *SIDES])
    parser.add_argument("--url")
    args = parser.parse_args()
    os.environ.setdefault("YOLO_OFFLINE", "true")
    if args.side == "serve":
        serve(args)
    else:
        print(
            json.dumps(
                SIDES[args.side](args) if args.side else compare(args), indent=None if args.side else 2
            )
        )
    sys.stdout.flush()
    # why: ultralytics leaves reading threads behind that would keep this process.
    os._exit(0)


if __name__ == "__main__":
    main()
