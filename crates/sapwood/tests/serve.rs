//! A program's own functions, served with the library alone.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use sapwood::kernel::connect::evergreen::import;
use sapwood::kernel::{Kernel, args, function};
use sapwood::net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};
use sapwood::serve::{Serve, ServeError};
use tokio::sync::oneshot;

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Shout {
    text: String,
}

fn shouting() -> Kernel {
    let kernel = Kernel::new();
    let shout = |input: Shout| async move { input.text.to_uppercase() };
    kernel
        .add(function("shout", "Says it louder.", shout))
        .unwrap();
    kernel
}

fn ask(address: SocketAddr, request: &str) -> String {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_of_a_program_is_served_at_every_face() {
    let bound = Serve::new(shouting())
        .listen("127.0.0.1:0")
        .key("hush")
        .bind()
        .await
        .unwrap();
    let address = bound.address();
    let (stop, stopped) = oneshot::channel::<()>();
    let served = tokio::spawn(bound.run_until(async { drop(stopped.await) }));
    let position = ServerAddress::new(format!("http://{address}")).with_key("hush");
    let session = ClientSession::connect(&position, ClientSessionOptions::default())
        .await
        .unwrap();
    let kernel = Kernel::new();
    kernel.add_all(import(&session).await.unwrap()).unwrap();
    let reply = kernel.run::<String>("shout", args! { text: "hello" }).await;
    assert_eq!(reply.unwrap(), "HELLO");
    session.close().await.unwrap();
    let body = r#"{"text":"hello"}"#;
    let post = move |key: &str| {
        let head =
            "POST /v2/models/shout/generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
        format!("{head}{key}content-length: {}\r\n\r\n{body}", body.len())
    };
    let asked =
        move || [post("authorization: Bearer hush\r\n"), post("")].map(|post| ask(address, &post));
    let [known, unknown] = tokio::task::spawn_blocking(asked).await.unwrap();
    assert!(
        known.starts_with("HTTP/1.1 200") && known.contains("HELLO"),
        "{known}"
    );
    assert!(unknown.starts_with("HTTP/1.1 401"), "{unknown}");
    stop.send(()).unwrap();
    served.await.unwrap();
}

#[tokio::test]
async fn other_machines_need_a_key() {
    let open = Serve::new(shouting()).listen("0.0.0.0:0").bind().await;
    assert!(matches!(open.err(), Some(ServeError::Open(_))));
    let keyed = Serve::new(shouting())
        .listen("0.0.0.0:0")
        .key("hush")
        .bind()
        .await;
    assert!(keyed.is_ok());
    let nowhere = Serve::new(shouting()).listen("nowhere").bind().await;
    assert!(matches!(nowhere.err(), Some(ServeError::Listen { .. })));
}
