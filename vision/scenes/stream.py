"""A camera that never ends: one place in which rendered objects come and go."""

from dataclasses import replace

import numpy as np

from vision.scenes.actors import EPISODE_S, Actor, Stage, inside, is_in_view, sample_episode
from vision.scenes.backdrops import draw_backdrop
from vision.scenes.camera import expose, sample_camera
from vision.scenes.canvas import Image
from vision.scenes.painter import draw_objects
from vision.scenes.scene import PLACES, TIMES_OF_DAY, Scene, SceneObject

_BACKDROP, _EPISODE, _NOISE = range(3)


class SceneStream:
    """Frames of a fixed camera and their ground truth, each a function of (seed, index) alone.

    place: one of PLACES. seed: not negative. fps: frames per second of the scene's time.
    size: width and height in pixels. time_of_day: one of TIMES_OF_DAY, drawn from the seed where it is None.
    Raises ValueError for anything else.
    """

    def __init__(
        self,
        place: str,
        seed: int,
        fps: float,
        size: tuple[int, int] = (448, 256),
        time_of_day: str | None = None,
    ) -> None:
        _check(place, seed, fps, size, time_of_day)
        rng = np.random.default_rng((seed, _BACKDROP))
        self.fps = fps
        self.seed = seed
        self.stage = Stage(place, time_of_day or str(rng.choice(TIMES_OF_DAY)), *size)
        self._backdrop = draw_backdrop(self._scene(), rng)
        self._camera = sample_camera(rng)
        self._episodes: dict[int, tuple[Actor, ...]] = {}

    def frame(self, index: int) -> tuple[Image, Scene]:
        """Frame `index` (from 0): the picture, uint8 [H, W, 3] BGR, and what is to be seen in it.

        Boxes are cut at the frame; an object of which less than a third is inside is drawn but not told.
        """
        episode, time_s = divmod(index / self.fps, EPISODE_S)
        shown = [a.seen(time_s, self.stage) for a in self._actors(int(episode)) if a.is_there(time_s)]
        objects, looks = [item for item, _ in shown], [look for _, look in shown]
        image = self._backdrop.copy()
        draw_objects(image, objects, looks, self.stage.time_of_day)
        told = [_cut(item, self.stage) for item in objects if is_in_view(item.box, self.stage)]
        noise = np.random.default_rng((self.seed, _NOISE, index))
        return expose(image, self._camera, noise), self._scene(*told)

    def _scene(self, *objects: SceneObject) -> Scene:
        stage = self.stage
        return Scene(stage.place, stage.time_of_day, stage.width, stage.height, objects)

    def _actors(self, episode: int) -> tuple[Actor, ...]:
        if episode not in self._episodes:
            rng = np.random.default_rng((self.seed, _EPISODE, episode))
            # why: frames are mostly read in order, so that the newest episode is the one asked for next
            self._episodes = {episode: sample_episode(rng, self.stage, is_first=episode == 0)}
        return self._episodes[episode]


def _cut(item: SceneObject, stage: Stage) -> SceneObject:
    return replace(item, box=inside(item.box, stage))


def _check(place: str, seed: int, fps: float, size: tuple[int, int], time_of_day: str | None) -> None:
    if place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}, not {place!r}")
    if time_of_day not in (None, *TIMES_OF_DAY):
        raise ValueError(f"time_of_day must be one of {', '.join(TIMES_OF_DAY)}, not {time_of_day!r}")
    if seed < 0 or fps <= 0 or min(size) < 32:
        raise ValueError(
            f"seed >= 0, fps > 0 and a size of 32 pixels or more are needed: {seed}, {fps}, {size}"
        )
