.intel_syntax noprefix
.text
# What parked.py sends a thread through, as position-independent x86-64 code behind its data.
#   as parked.s -o parked.o && objcopy -O binary -j .text parked.o parked.bin
# parked.hex has what this makes behind the data, as digits.
# tests/attach/test_inject.py assembles this and compares.
magic: .quad 0
is_initialized: .quad 0
ensure: .quad 0
run: .quad 0
release: .quad 0
create: .quad 0
detach: .quad 0
pending: .quad 0
back: .quad 0
name: .quad 0,0

# a parked thread (or a running main thread) comes by here, with every register it had
entry:
  lea rsp,[rsp-128]        # the red zone; lea leaves the flags alone
  pushfq
  push rax
  push rbx
  push rcx
  push rdx
  push rsi
  push rdi
  push rbp
  push r8
  push r9
  push r10
  push r11
  push r12
  push r13
  push r14
  push r15
  cld
  mov rbx,rsp
  sub rsp,4096
  and rsp,-64
  mov r12,rsp
  xor eax,eax
  mov ecx,8
  lea rdi,[rsp+512]
  rep stosq
  mov eax,0xe7             # x87, SSE, AVX, AVX-512
  xor edx,edx
  xsave64 [r12]
  sub rsp,64
  cmp qword ptr [rip+pending],0
  jz spawn
  call [rip+is_initialized]  # Py_AddPendingCall of a Python that only starts reads a null pointer
  test eax,eax
  jz done
  lea rdi,[rip+later]
  xor esi,esi
  call [rip+pending]
  jmp done
spawn:
  mov rdi,rsp
  xor esi,esi
  lea rdx,[rip+thread]
  xor ecx,ecx
  call [rip+create]
  test eax,eax
  jnz done
  mov rdi,[rsp]
  call [rip+detach]
done:
  mov eax,0xe7
  xor edx,edx
  xrstor64 [r12]
  mov rsp,rbx
  pop r15
  pop r14
  pop r13
  pop r12
  pop r11
  pop r10
  pop r9
  pop r8
  pop rbp
  pop rdi
  pop rsi
  pop rdx
  pop rcx
  pop rbx
  pop rax
  popfq
  lea rsp,[rsp+128]
  jmp [rip+back]           # rax is what the system call is to be, or was

# the new thread
thread:
  endbr64
  push rbx
  mov eax,157
  mov edi,15
  lea rsi,[rip+name]
  syscall
  call [rip+is_initialized]
  test eax,eax
  jz out
  call [rip+ensure]
  mov ebx,eax
  call later
  mov edi,ebx
  call [rip+release]
out:
  xor eax,eax
  pop rbx
  ret

# what a pending call runs: it never fails
later:
  endbr64
  push rbx
  lea rdi,[rip+text]
  call [rip+run]
  xor eax,eax
  pop rbx
  ret
text:
