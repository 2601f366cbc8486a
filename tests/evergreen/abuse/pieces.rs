//! Bytes that arrive one by one, without pauses.

use std::net::SocketAddr;

use bytes::Bytes;
use prost::Message;
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};
use sapwood_tests::raw::{action, leaf};
use sapwood_tests::socket::{Socket, SocketReply};
use sapwood_tests::{Running, request};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::super::loopback::{text, whole};
use super::{honest, unharmed};

/// A proxy that forwards each byte separately, both ways.
async fn trickling(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(server).await.unwrap();
            client.set_nodelay(true).unwrap();
            server.set_nodelay(true).unwrap();
            tokio::spawn(async move {
                let (mut client, mut server) = (client.into_split(), server.into_split());
                // Either may be cancelled: when one direction ends, the connection has ended.
                tokio::select! {
                    () = bytes_by_itself(&mut client.0, &mut server.1) => {}
                    () = bytes_by_itself(&mut server.0, &mut client.1) => {}
                }
            });
        }
    });
    address
}

async fn bytes_by_itself(from: &mut (impl AsyncRead + Unpin), to: &mut (impl AsyncWrite + Unpin)) {
    let mut buf = [0; 1_024];
    while let Ok(read @ 1..) = from.read(&mut buf).await {
        for byte in &buf[..read] {
            if to.write_all(&[*byte]).await.is_err() {
                return;
            }
        }
    }
}

/// EV-970: in every dialect, the handshakes included.
#[tokio::test]
async fn ev_705_messages_that_arrive_byte_by_byte_are_decoded() {
    let server = Running::with_test_functions().await;
    let address = trickling(server.address).await;
    for (scheme, rest) in [
        ("http", ""),
        ("ws", ""),
        ("ws", "/?dialect=json"),
        ("ws", "/?dialect=msgpack"),
    ] {
        let url = ServerAddress::new(format!("{scheme}://{address}{rest}"));
        let session = ClientSession::connect(&url, ClientSessionOptions::default())
            .await
            .unwrap();
        let mut writer = session.write().unwrap();
        let mut expect = String::new();
        for index in 0..40 {
            let piece = format!("<{index}:{}>", "ü".repeat(40));
            expect.push_str(&piece);
            writer.write(&text(""), Bytes::from(piece)).await.unwrap();
        }
        let input = writer.end(&text("")).unwrap();
        let call = session.call(request("echo", &[("text", &input)], &["response"]));
        let call = call.unwrap();
        assert_eq!(
            whole(call.output("response")).await,
            expect,
            "{scheme}{rest}"
        );
        honest(&server).await;
        drop((input, call));
        session.close().await.unwrap();
    }
    unharmed(&server).await;
}

/// D-34
#[tokio::test]
async fn ev_705_a_large_message_in_one_byte_frames_is_decoded_at_speed() {
    let server = Running::with_test_functions().await;
    let mut all = action("echo", &[("text", "p")], &[("response", "r")]);
    all.node_fragments = vec![leaf("p", 0, 300_000)];
    all.actions
        .push(action("FINISH", &[], &[]).actions.remove(0));
    let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
    let bytes = all.encode_to_vec();
    let (sent, ()) = futures::join!(socket.send_in_pieces(&bytes, 1), honest(&server));
    let () = sent;
    let (reply, close) = socket.rest().await;
    assert_eq!(close, Some((1000, String::new())));
    let back = reply.iter().map(|reply| match reply {
        SocketReply::Binary(bytes) => bytes.len(),
        _ => 0,
    });
    assert!(back.sum::<usize>() > 300_000);
    unharmed(&server).await;
}
