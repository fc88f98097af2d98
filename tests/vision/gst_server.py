"""An RTSP server by GStreamer, for the system's Python: `gst_server.py PORT WIDTHxHEIGHT [USER PASSWORD]`."""

import sys

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtsp", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtsp, GstRtspServer  # noqa: E402


def main() -> None:
    port, size, *login = sys.argv[1:]
    width, height = size.split("x")
    Gst.init(None)
    server = GstRtspServer.RTSPServer(service=port, address="127.0.0.1")
    factory = GstRtspServer.RTSPMediaFactory(shared=True)
    factory.set_launch(
        f"( videotestsrc is-live=true pattern=ball ! video/x-raw,width={width},height={height},framerate=15/1"
        " ! x264enc tune=zerolatency speed-preset=ultrafast key-int-max=15 ! rtph264pay name=pay0 pt=96"
        " audiotestsrc is-live=true ! alawenc ! rtppcmapay name=pay1 pt=8 )"
    )
    if login:
        _ask_for(server, factory, *login)
    server.get_mount_points().add_factory("/cam", factory)
    server.attach(None)
    print("ready", flush=True)
    GLib.MainLoop().run()


def _ask_for(server: GstRtspServer.RTSPServer, factory: object, user: str, password: str) -> None:
    auth = GstRtspServer.RTSPAuth()
    auth.set_supported_methods(GstRtsp.RTSPAuthMethod.DIGEST)
    token = GstRtspServer.RTSPToken()
    token.set_string("media.factory.role", "viewer")
    auth.add_digest(user, password, token)
    server.set_auth(auth)
    permissions = GstRtspServer.RTSPPermissions()
    permissions.add_role("viewer")
    permissions.add_permission_for_role("viewer", "media.factory.access", True)
    permissions.add_permission_for_role("viewer", "media.factory.construct", True)
    factory.set_permissions(permissions)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
