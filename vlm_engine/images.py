"""Which images sequences read: planned for the encoder, held until they are read, then given back."""

from vlm_engine.cost_model import SliceWork
from vlm_engine.draft import Draft
from vlm_engine.encoder_cache import EncoderCache
from vlm_engine.plan import Chunk, EncodeItem
from vlm_engine.sequence import Placeholder, Sequence


class Images:
    """The images of sequences in the encoder cache.

    Args:
        cache: Encoded images and those on their way.
    """

    def __init__(self, cache: EncoderCache) -> None:
        self._cache = cache
        self.aside: frozenset[bytes] = frozenset()
        """Digests of those that the side thread encodes."""

    def _is_encoded(self, image: Placeholder) -> bool:
        return not self._cache.num_left(image) and image.digest not in self.aside

    def has_all(self, sequence: Sequence) -> bool:
        """Whether all that the sequence has still to read is encoded."""
        return all(map(self._is_encoded, sequence.images_left))

    def is_reached(self, sequence: Sequence) -> bool:
        """Whether the sequence has no image, or the encoder has begun with its first one."""
        if not sequence.placeholders:
            return True
        first = sequence.placeholders[0]
        return sequence.num_computed_tokens > first.start or first.digest in self._cache

    def work_left(self, sequence: Sequence) -> SliceWork:
        """What the encoder has still to do for the sequence; the same image twice is work once."""
        images = {image.digest: image for image in sequence.images_left}.values()
        return sum(map(self._cache.work_left, images), SliceWork())

    def encode_ahead(self, sequence: Sequence, start: int, end: int, draft: Draft) -> list[str]:
        """Plan slices of the images in reach, in order; returns what is in the way, if anything."""
        cache = self._cache
        for image in sequence.images_between(start, end):
            if image.digest in self.aside:
                return ["encoder_budget"]
            if not cache.can_hold(image):
                return ["encoder_cache"]
            if cache.num_left(image):
                done = len(image.slices) - cache.num_left(image)
                count = draft.budget.take_slices(sequence, image, done)
                if not count:
                    return ["encoder_budget"]
                cache.advance(image, count)
                draft.add(EncodeItem(sequence, image, done, done + count))
            cache.hold(image.digest, sequence.request_id)
            if cache.num_left(image):
                return []
        return []

    def clip(self, sequence: Sequence, start: int, end: int) -> int:
        """Where a chunk from `start` must end so that all its images are encoded and held.

        invariant: an image that attends both ways is not cut; what a sequence computes next is never less
        than `Sequence.num_together`.
        """
        for image in sequence.images_between(start, end):
            is_held = self._cache.is_held(image.digest, sequence.request_id)
            is_cut = image.attends_both_ways and end < image.end
            if is_cut or not (is_held and self._is_encoded(image)):
                return max(start, image.start)
        return end

    def release_read(self, chunk: Chunk) -> None:
        """Give up the images that a computed chunk was the last to read."""
        sequence = chunk.sequence
        unread = {image.digest for image in sequence.placeholders if image.end > chunk.end}
        for image in sequence.images_between(chunk.start, chunk.end):
            if image.digest not in unread:
                self._cache.release(image.digest, sequence.request_id)

    def release(self, sequence: Sequence) -> None:
        """Give up all images of a sequence."""
        for image in sequence.placeholders:
            self._cache.release(image.digest, sequence.request_id)
